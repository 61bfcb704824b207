"""Exceptions to the punctuation rules: English short forms and other runs with listed words."""

from __future__ import annotations

import string
from collections.abc import Iterator

PRONOUNS = "i you he she it we they".split()
QUESTIONS = "who what when where why how there that this these those".split()
NEGATED = (
    "ca could do does did had may might must need ought sha should wo would ai are is was were have has dare".split()
)
WHOLE = (
    "'s 'S 'd 're 'em 'll 'cause 'Cause 'cos 'Cos 'coz 'Coz 'cuz 'Cuz 'bout 'nuff and/or w/o ma'am Ma'am o'clock"
    " O'clock lovin' Lovin' havin' Havin' doin' Doin' goin' Goin' nothin' Nothin' nuthin' Nuthin' ol' Ol'"
    " somethin' Somethin' C++ Mt. Ak. Ala. Apr. Ariz. Ark. Aug. Calif. Colo. Conn. Dec. Del. Feb. Fla. Ga. Ia. Id."
    " Ill. Ind. Jan. Jul. Jun. Kan. Kans. Ky. La. Mar. Mass. Mich. Minn. Miss. N.C. N.D. N.H. N.J. N.M. N.Y. Neb."
    " Nebr. Nev. Nov. Oct. Okla. Ore. Pa. S.C. Sep. Sept. Tenn. Va. Wash. Wis. a.m. p.m. Adm. Bros. co. Co. Corp."
    " D.C. Dr. e.g. E.g. E.G. Gen. Gov. i.e. I.e. I.E. Inc. Jr. Ltd. Md. Messrs. Mo. Mont. Mr. Mrs. Ms. Ph.D."
    " Prof. Rep. Rev. Sen. St. vs. v.s. :) :( :D ;) :-) :-( :/ ;-) :P <3 ^_^ -_- xD :'( =) \\n \\t"
).split()
DIVIDED = (
    "y'|all y|all how|'d|'y How|'d|'y not|'ve Not|'ve not|ve Not|ve can|not Can|not gon|na Gon|na got|ta Got|ta"
    " let|'s Let|'s c'm|on C'm|on i|'m I|'m i|m I|m i|'m|a I|'m|a i|m|a I|m|a"
).split()
ORDINARY = frozenset("ill Ill its Its hell Hell shell Shell shed Shed were Were well Well whore Whore".split())
"""Ordinary words that are spelled like a short form."""

UNITS = (
    "km km\u00b2 km\u00b3 m m\u00b2 m\u00b3 dm dm\u00b2 dm\u00b3 cm cm\u00b2 cm\u00b3 mm mm\u00b2 mm\u00b3 ha"
    " \u00b5m nm yd in ft kg g mg \u00b5g t lb oz m/s km/h kmh mph hPa Pa mbar mb MB kb KB gb GB tb TB T G M K %"
).split()
"""Units that are separate words after a digit."""


def build_word_lengths() -> dict[str, tuple[int, ...]]:
    """Lengths of the words of each listed run of characters."""
    found = {entry.replace("|", ""): tuple(map(len, entry.split("|"))) for entry in _list_entries()}
    return {run: lengths for run, lengths in found.items() if run not in ORDINARY}


def _list_entries() -> Iterator[str]:
    yield from WHOLE
    yield from DIVIDED
    yield from (f"{letter}." for letter in string.ascii_lowercase)
    for subject, verbs in _list_subjects():
        for verb in verbs.split():
            for each in (subject, subject.title()):
                yield f"{each}|'{verb}"
                yield f"{each}|{verb}".replace("'", "")
    for verb in NEGATED:
        for each in (verb, verb.title()):
            for tail in ("n't", "nt", "n't|'ve", "nt|ve"):
                yield f"{each}|{tail}"
    for hour in range(1, 13):
        yield from (f"{hour}|{half}" for half in ("a.m.", "am", "p.m.", "pm"))


def _list_subjects() -> Iterator[tuple[str, str]]:
    """Yield words, and the short forms of verbs after them."""
    for word in PRONOUNS:
        yield word, "ll ll|'ve d d|'ve"
    for word in "i you we they".split():
        yield word, "ve"
    for word in "you we they".split():
        yield word, "re"
    for word in "he she it".split():
        yield word, "s"
    for word in QUESTIONS:
        yield word, "ll ll|'ve d d|'ve"
        if word not in ("these", "those"):
            yield word, "s"
        if word not in ("that", "this"):
            yield word, "re ve"
    for word in "could might must should would".split():
        yield word, "ve"
