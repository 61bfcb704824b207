"""Without a sandbox, the static part of a script is read as bash reads it, and the rest is named."""

from __future__ import annotations

import pytest

from primus.config.imports.static_script import read_static_script


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A='x y'; cmd $A \"$A\"", ["cmd", "x", "y", "x y"]),
        ("A=(1 '2 3' # 4\n 5); A+=(6); cmd ${A[@]}", ["cmd", "1", "2", "3", "5", "6"]),
        ("A=(1 '2 3'); cmd \"${A[@]}\" x${A[*]}y", ["cmd", "1", "2 3", "x1", "2", "3y"]),
        ("A=1; A+=2; cmd $A ${B:-$A} ${B-x} ${A:+y} ${B+z}", ["cmd", "12", "12", "x", "y"]),
        ("export A=1 B='2 3'; declare -a C=(4); : ${D:=5}; cmd $A $B ${C[@]} $D", ["cmd", "1", "2", "3", "4", "5"]),
        ("cmd a\\ b \"c\\\"d\" 'e'\\''f' \"g\\h\"", ["cmd", "a b", 'c"d', "e'f", "g\\h"]),
        ("cmd 1 \\\n  2 # 3\n", ["cmd", "1", "2"]),
        ("A=7; cmd $((A * 2 + 1)) $(( 9 / 2 )) $((2 % 0))", ["cmd", "15", "4", "\0$((2 % 0))\0"]),
        ("cat <<EOF > x\n--lr 1 'quote\nEOF\ncmd x", ["cmd", "x"]),
        ('cmd ${X:-"}"} "${X:-"}"}x" ${X:-a\\}b} ${X:-a b}', ["cmd", "}", "}x", "a}b", "a", "b"]),
        ("bash -c 'cmd --x 1'", ["cmd", "--x", "1"]),
        ("R='--x 1'; eval cmd $R", ["cmd", "--x", "1"]),
        ("R='cmd $(date +%F) $2'; bash -c \"$R\"", ["cmd", "\0$(date +%F)\0", "\0$2\0"]),
        ("cmd > out.txt 2>&1 a 3 &>> log", ["cmd", "a", "3"]),
        ("A=; B=1 cmd $A '' x", ["cmd", "", "x"]),
        (
            "cmd $X ${F%.tar} `date` $(ls '(') $1 $@",
            ["cmd", "\0$X\0", "\0${F%.tar}\0", "\0`date`\0", "\0$(ls '(')\0", "\0$1\0"],
        ),
        ("if [ $A = 1 ]; then cmd 1; B=2; else cmd 3; fi; cmd 4 $B", ["cmd", "4", "\0$B\0"]),
        ("P=1; for i in 1 2; do P+=2; cmd $i; done\ncmd $P $i", ["cmd", "1", "\0$i\0"]),
        ("A=0; case $A in a|b) A=1;; *) if x; then cmd 3; fi;; esac; cmd $A", ["cmd", "\0$A\0"]),
    ],
)
def test_words_are_expanded_as_bash_does(text: str, words: list[str]) -> None:
    commands = [command.words for command in read_static_script(text, {}).commands if command.words[0] == "cmd"]
    assert commands[-1] == words
    assert len(commands) == 1


def test_branches_and_loops_are_named_with_the_arguments_in_them() -> None:
    text = '\nif [ $A ]; then\n  cmd --lr 1\n  ARGS+=(--split 1)\nelse P="$P --seed 2"; fi\nwhile x; do y; done\n'
    skipped = read_static_script(text, {}).skipped
    assert [(block.line, block.keyword, block.flags) for block in skipped] == [
        (2, "if", ["--lr", "--split", "--seed"]),
        (6, "while", []),
    ]


def test_what_a_branch_adds_to_leaves_what_was_there() -> None:
    text = "P='--a 1'; Q=(--b 2); if x; then P=\"$P --c\"; Q+=(--d); fi; cmd $P ${Q[@]}"
    assert read_static_script(text, {}).commands[-1].words == ["cmd", "--a", "1", "--b", "2"]


@pytest.mark.parametrize("text", ["\nA=(1\n", "\ncmd '1\n", '\ncmd "1\n', "\ncmd ${A\n", "\ncmd `x\n"])
def test_what_is_not_closed_is_named_with_its_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"line 2: .* is not closed"):
        read_static_script(text, {})


@pytest.mark.parametrize(
    "double",
    ["A=$A$A\n" * 30, "A=($A $A)\n" * 30, "A=$A$A\n" * 9 + f"cmd {'$A' * 2000}\n"],
    ids=["text", "array", "command"],
)
def test_variables_that_double_each_other_end(double: str) -> None:
    with pytest.raises(ValueError, match="more than 4 MiB"):
        read_static_script(f"A=xxxxxxxx\n{double}", {})
