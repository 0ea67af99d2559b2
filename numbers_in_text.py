r"""Reads numbers out of free text, exactly, in linear time.

What a number is: ASCII digits with an optional sign, decimals (`3.50`, `.5`), thousands marks in well-formed groups of
three (`8,250`, LaTeX `8{,}250` and `8,\!250`), an exponent (`3.5e2`), a simple fraction (`2/3`, `\frac{2}{3}`,
`\frac23`), a mixed number (`2 2/3`, `2\frac{2}{3}`). Values are `fractions.Fraction`, never floats, so `29.00` equals
`29` and nothing is rounded.

`-` and U+2212 are signs unless they follow a digit, a letter or a closing bracket; an en dash is not a sign. A percent
sign is ignored (`28%` is 28). A comma that is no thousands mark separates two numbers (`20,00` is 20 and 0). Other
digits (full width, superscripts, circled) are no numbers; digits are numbers wherever they stand (`T3` holds a 3). What
looks like one number in a notation that is not supported (`1.234,5`, `1.2.3`, `1/2/2024`, `5/0`) is one token without a
value, so that no fragment of it can be paid for.

Left out: European decimal commas, numbers in words, arithmetic. Numbers of more than MAX_DIGITS digits, written out,
have no value either: an exponent such as `1e999999999` then costs neither time nor memory, and as no gold may be that
large, no right answer is lost; the same holds for a spelling of more than 4 * MAX_DIGITS characters.
"""
import re
from fractions import Fraction

MAX_DIGITS = 1000

# Every repetition below is followed by something it cannot itself match, and none starts with spaces: linear time on
# any text.
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:(?:,(?:\\!)?|\{,\})[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|(?<![^\W_])(?<!\.)\.[0-9]+)(?:[eE][-+\u2212]?[0-9]+)?"
_SIGN = r"(?:(?<![^\W_])(?<![)\]}])[-+\u2212])?"
_SIGNED = rf"[-+\u2212]?{_DECIMAL}"  # inside \frac{...}{...} and after a slash nothing can stand before the sign
_NUMBER = re.compile(rf"""
    (?P<european> [1-9][0-9]{{0,2}} (?:\.[0-9]{{3}})+ ,[0-9]+ (?![.,]?[0-9]) )
  | (?P<sign> {_SIGN} ) (?:\\?[$€£])?
    (?:
        (?: (?P<whole>{_INTEGER}) \ * )? \\[dt]?frac \ *
        (?: \{{\ *(?P<top>{_SIGNED})\ *\}} \ * \{{\ *(?P<bottom>{_SIGNED})\ *\}}
          | (?P<top1>[0-9])\ ?(?P<bottom1>[0-9]) )
      | (?: (?P<mixed>{_INTEGER}) \ + (?=[0-9]) (?P<over>{_INTEGER}) / (?P<under>{_INTEGER}) (?![0-9])
          | (?P<number>{_DECIMAL}) (?: \ ?/\ ? (?P<denominator>{_SIGNED}) )?
        ) (?P<tail> (?:[./][0-9]+)+ )?
    )""", re.VERBOSE)
_NUMBER_CHARACTERS = re.compile(rf"[-+\u2212.,/ \\{{}}!$€£0-9dtfraceE]{{1,{MAX_DIGITS * 5}}}")
_SCIENTIFIC = re.compile(r"([0-9]*)(?:\.([0-9]*))?(?:[eE]([-+]?[0-9]+))?\Z")


def _decimal(text: str) -> Fraction | None:
    """The value of one decimal number; None when written out it would have more than MAX_DIGITS digits."""
    text = re.sub(r"[{},\\!+]", "", text).replace("\u2212", "-")
    negative = text.startswith("-")
    whole, decimals, exponent = _SCIENTIFIC.match(text.lstrip("-")).groups()
    decimals = (decimals or "").rstrip("0")
    digits = (whole + decimals).lstrip("0")
    if not digits:
        return Fraction(0)
    power = (exponent or "0").lstrip("-").lstrip("0") or "0"
    shorter = digits.rstrip("0")
    if len(power) > 9 or len(shorter) > MAX_DIGITS:
        return None
    shift = -int(power) if (exponent or "").startswith("-") else int(power)
    shift += len(digits) - len(shorter) - len(decimals)
    if not -MAX_DIGITS <= shift <= MAX_DIGITS:
        return None
    value = Fraction(int(shorter)) * Fraction(10) ** shift
    return -value if negative else value


def _value(match: re.Match) -> Fraction | None:
    if match["european"] or match["tail"]:
        return None
    top, bottom = match["top"] or match["top1"], match["bottom"] or match["bottom1"]
    if match["mixed"]:
        whole, top, bottom = match["mixed"], match["over"], match["under"]
    elif top:
        whole = match["whole"] or "0"
    else:
        whole, top, bottom = "0", match["number"], match["denominator"] or "1"
    parts = [_decimal(whole), _decimal(top), _decimal(bottom)]
    if None in parts or parts[2] == 0:
        return None
    value = parts[0] + parts[1] / parts[2]
    return -value if match["sign"] in ("-", "\u2212") else value


def last_number(text: str) -> Fraction | None:
    r"""The value of the last number of the text; None when there is none or it cannot be read.

    >>> last_number("That makes $8{,}250.50, all told.")
    Fraction(16501, 2)
    """
    digit = max(map(text.rfind, "0123456789"))
    if digit < 0:
        return None
    # The last number ends at the last digit (and a brace) and cannot reach back over a character that no number holds:
    # reading from there on spares the rest of the text. No readable number is as long as the window, so one that fills
    # it has no value.
    start = digit + 1 - _NUMBER_CHARACTERS.match(text[digit::-1]).end()
    *_, last = _NUMBER.finditer(text, start, digit + 1 + MAX_DIGITS)
    return None if last.start() == start and digit - start > MAX_DIGITS * 4 else _value(last)


def first_number(text: str) -> Fraction | None:
    """The value of the first number of the text; None when there is none or it cannot be read."""
    digit = re.search("[0-9]", text)
    return _value(_NUMBER.search(text, max(0, digit.start() - 50))) if digit else None


# What may stand around the one number of a box, a tag or a gold: text commands, spaces, money, degrees. Anything else
# (\pi, \sqrt) makes it an expression.
_PLAIN_COMMANDS = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|boxed|left|right|q?quad|circ|degree|approx|"
                             r"[dt]?frac)(?![A-Za-z])|\\[^A-Za-z]")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\s?\^\s?(?:[-\u2212]?[0-9]|\{\s?[-\u2212]?[0-9]\s?\})")
_OPERATOR_BEFORE = re.compile(r"(?:[0-9)\]}]|(?<![A-Za-z])[A-Za-z])\s?(?:\*\*?|[-+/^\u2212×·÷])\s?\(?\Z")
_OPERATOR_AFTER = re.compile(r"\s?(?:\*\*?|[-+/^\u2212×·÷])\s?(?:[0-9({]|[A-Za-z](?![A-Za-z]))"
                             r"|[xyz](?![A-Za-z])|!(?!\w)")


def stated_number(text: str) -> Fraction | None:
    r"""The last number of the text, None where it is only a part of an expression (`x+1`, `2\pi`, `6+8`).

    After an equals sign only what follows the last one counts: `6+8=14` states 14. Units may follow (`14 cm^2`,
    `14\text{ m}^2`).

    >>> stated_number(r"\sqrt{2}") is None
    True
    """
    return _stated(text)[0]


def only_number(text: str) -> Fraction | None:
    """As stated_number, and None too when there are several numbers to choose from (`13 or 14`)."""
    value, count = _stated(text)
    return value if count == 1 else None


def _stated(text: str) -> tuple[Fraction | None, int]:
    """The stated number and how many numbers stood in its line, after the last equals sign that a number follows."""
    side = text.rpartition("=")[2]
    side = _UNIT_POWER.sub("", side if _NUMBER.search(side) else text)
    line = next((line for line in reversed(side.splitlines()) if _NUMBER.search(line)), "")
    found = list(_NUMBER.finditer(line))
    if not found or "\\" in _PLAIN_COMMANDS.sub("", line):
        return None, len(found)
    start, end = found[-1].span()
    if _OPERATOR_BEFORE.search(line, max(0, start - 8), start) or _OPERATOR_AFTER.match(line, end):
        return None, len(found)
    return _value(found[-1]), len(found)
