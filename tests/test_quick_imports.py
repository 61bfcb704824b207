"""What a command imports at its start, each in an interpreter of its own."""

import subprocess
import sys

import pytest

START = "import sys, primus.cli.main, primus.config.source, yaml\n"


def run_after_start(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing of Python 3.10 lacks what msgspec needs")
def test_a_command_starts_without_inspect_and_typing_extensions_can_still_be_imported():
    code = "print('inspect' in sys.modules)\nimport typing_extensions\nprint(typing_extensions.__name__)"
    assert run_after_start(code).split() == ["False", "typing_extensions"]


def test_the_pattern_of_the_reader_in_python_is_compiled_when_that_reader_is_used():
    code = """
pattern = yaml.reader.Reader.NON_PRINTABLE
print('search' in vars(pattern))
assert yaml.load('a: [1, text]', Loader=yaml.SafeLoader) == {'a': [1, 'text']}
print('search' in vars(pattern))
try:
    yaml.load('a: \\x07', Loader=yaml.SafeLoader)
except yaml.reader.ReaderError as error:
    print(error.character)
"""
    assert run_after_start(code).split() == ["False", "True", "7"]
