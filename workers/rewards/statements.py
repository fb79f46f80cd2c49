"""What a response states as its answer: the one reader of all rewards that compare answers, and of the vote.

The text with the answer (`answer_text.answer_part`) is read in this order: the last box; what directly follows the last
"answer is", "answer:" or "####"; the last expression. An expression is read whole or not at all: "12π" is
never 12. All patterns take time in proportion to the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import dropwhile
from unicodedata import normalize

from troupe.workers.rewards.answer_text import last_box, plain

_LONGEST = 50_000
"""Characters of a response that are read: its last ones."""
_NAMES = re.compile(
    r"答案[是为]?|选择?(?=\s?[A-J](?![A-Za-z]))|答えは?|정답은?"
    r"|\b(?:Antwort|Respuesta|Resposta|Réponse|Risposta|Ответ)\b(?:\s+(?:ist|lautet|es|est|é|è)\b)?",
    re.IGNORECASE,
)
"""What other languages name the answer with."""
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_BORDERS = re.compile(rf"(?<=[{_CJK}])(?=[-+$\\(]?[0-9])|(?<=[0-9])(?=[{_CJK}])")
_EMPHASIS = re.compile(r"(?<![\w*`])([*`]{1,3}|_{1,3})(?=\S)([^*`\n]{1,500}?)(?<=\S)\1(?![\w*`])")
_COLON = re.compile(r"(?<=[^\W\d])(\s*:\**)(?=[^\s/*])")


def _ascii(text: str) -> str:
    return normalize("NFKC", text).replace("\N{FRACTION SLASH}", "/").replace("\N{MINUS SIGN}", "-")


def _improper(found: re.Match[str]) -> str:
    whole, part, parts = (int(number) for number in found.groups())
    return f"{whole * parts + part}/{parts}" if part < parts else found[0]


def _scaled(found: re.Match[str]) -> str:
    size = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}[found[2].lower()]
    return format(Decimal(f"{found[1].replace(',', '')}e{size}").normalize(), "f")


_SYMBOLS = {
    symbol: rf"\{name} "
    for symbol, name in re.findall(
        r"(\S+) ([a-z]+)",
        "π pi ∞ infty ≤ le ≥ ge <= le >= ge ≠ ne × times · cdot ⋅ cdot ÷ div ± pm ∪ cup ∈ in ∅ emptyset θ theta",
    )
}
_FORMS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\s{3,}"), lambda found: "\n\n" if "\n" in found[0] else " "),
    # 1.000,5 and 3{,}5 and 10 000
    (
        re.compile(r"(?<![0-9.,])([0-9]{1,3}(?:\.[0-9]{3})+),([0-9]+)(?![0-9.,])"),
        lambda found: found[1].replace(".", "") + "." + found[2],
    ),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])"), "."),
    (
        re.compile(r"(?<![\w.,])(?<![\w.,] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?![\w/]|[., ]+[0-9])"),
        lambda found: found[0].replace(" ", ""),
    ),
    # ####7, 90° and √16
    (re.compile(r"(?<=##)(?=[-+.0-9])"), " "),
    (re.compile(r"(?<!\s)\s*°\s*[CF]?(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"√\s*([0-9]+|[a-z](?![a-z]))"), r"\\sqrt{\1}"),
    (re.compile(r"(?:√\s*|(?<![\\A-Za-z])sqrt\s?)\(([^()\n]{1,100})\)"), r"\\sqrt{\1}"),
    # 0.1\overline{6}
    (
        re.compile(r"(?<![\w.,])([0-9]{0,15})\.([0-9]{0,15})\\overline\{([0-9]{1,15})\}"),
        lambda found: (
            rf"\frac{{{int(found[1] + found[2] + found[3]) - int(f'0{found[1]}{found[2]}')}}}"
            f"{{{(10 ** len(found[3]) - 1) * 10 ** len(found[2])}}}"
        ),
    ),
    # 3½ and 2³
    (re.compile("[¼-¾⅐-⅞]"), lambda found: f" {_ascii(found[0])}"),
    (re.compile(r"(?<=[\w)])[⁻⁰¹²³⁴-⁹]+"), lambda found: f"^{{{_ascii(found[0])}}}"),
    # 3 × 10^8 and 3·10^{-8}
    (
        re.compile(
            r"(?<![\w.,^/*×·}])([0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})\s?(?:[×·x*]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?"
            r"(?:\{([-+]?[0-9]{1,2})\}|([-+]?[0-9]{1,2}))(?![\w.]*[0-9])"
        ),
        lambda found: format(Decimal(f"{found[1]}e{found[2] or found[3]}"), "f"),
    ),
    (re.compile("|".join(_SYMBOLS)), lambda found: _SYMBOLS[found[0]]),
    # US$7, €7, -$7, ~7 and \textbf{7}
    (re.compile(r"\b(?:US|AU|NZ|CA|HK|SG)\\?\$\s?(?=[0-9])"), ""),
    (re.compile(r"(?<=-)\\?[$€£¥₹]\s?(?=[.0-9])|[€£¥₹]\s?(?=-?[.0-9])|(?<=[0-9])\s?[€£¥₹]"), ""),
    (re.compile(r"(?:^|(?<=\s))~(?=\.?[0-9])"), ""),
    (re.compile(r"\\(?:math(?:bf|rm|it|sf)|text(?:bf|it)?|bm)\{\s*(-?[0-9][0-9.,/]*)\s*\}"), r"\1"),
    # +7 and minus 7, unless they are added to or taken from something before them
    (
        re.compile(
            r"(?:^|(?<=[\n:=${(\[>])|(?<=[:=${(\[] )|(?<=[a-z]{2} ))(\+|minus |negative )(?=\.?[0-9])", re.IGNORECASE
        ),
        lambda found: "" if found[1] == "+" else "-",
    ),
    # 1.2e3, .5, 3 1/2, 1 million, 50 percent and 12th
    (
        re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([-+]?[0-9]{1,2})(?![\w.]*[0-9])"),
        lambda found: format(Decimal(found[0]), "f"),
    ),
    (re.compile(r"(?<![\w.)}])(?=\.[0-9])"), "0"),
    (re.compile(r"(?<![\w.,/^])([0-9]{1,15}) ([0-9]{1,15})/([0-9]{1,15})(?![\w/])"), _improper),
    (
        re.compile(r"(?<![\w.,])([0-9][0-9,]{0,20}(?:\.[0-9]{1,20})?)[ -](thousand|million|billion|trillion)\b", re.I),
        _scaled,
    ),
    (re.compile(r"(?<=[0-9]) : (?=[0-9])"), ":"),
    (re.compile(r"(?<=[0-9])\s?(?:percent\b|per cent\b)"), "%"),
    (re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b"), ""),
)
"""Forms of numbers and symbols that math-verify does not read, with what it reads."""

_ONES = re.findall(
    "[a-z]+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall("[a-z]+", "twenty thirty forty fifty sixty seventy eighty ninety")
_VALUES = {**{word: n for n, word in enumerate(_ONES)}, **{word: 10 * n for n, word in enumerate(_TENS, 2)}}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 1_000_000}
_SMALL = rf"(?:(?:{'|'.join(_TENS)})(?:[ -](?:{'|'.join(_ONES[1:10])}))?|{'|'.join(reversed(_ONES))})"
_SCALE = rf"[ -](?:{'|'.join(_SCALES)})"
_NUMBER_WORDS = re.compile(
    rf"(?:{_SMALL}|an?(?={_SCALE}))(?:(?:{_SCALE})+(?:(?:,? and |,? |-){_SMALL})?)*\b(?!,? (?:or|and) )", re.IGNORECASE
)

_NAMED = r"pi|sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|theta|alpha|beta|infinity|infty"
_MATHS = re.compile(
    rf"""
    (?P<formula>\$\$[^$]{{1,1000}}\$\$ | \$(?![\s,.])[^$\n]{{1,400}}\$
        | \\begin\{{[a-z]?matrix\}}[^$]{{1,1000}}?\\end\{{[a-z]?matrix\}}
        | \\\[[^\]]{{1,1000}}\\\] | \\\([^\n]{{1,400}}?\\\))
  | (?P<code>(?<![\w.:])[0-9]{{1,20}}(?:[-:][0-9]{{1,20}}){{2,9}}(?![\w:])
        | (?<![\w.:])[0-9]{{1,20}}:[0-9]{{1,20}}(?![\w:])
        | (?<![\w.])[0-9]{{1,40}}_\{{?[0-9]{{1,3}}\}}?)
  | (?P<number>[0-9]{{1,3}}(?:,[0-9]{{3}})+(?:\.[0-9]+)?(?![0-9]) | [0-9]+(?:[.,][0-9]+)*)
  | (?P<command>\\(?:text|mbox|mathrm)\{{[^{{}}]{{0,60}}\}} | \\[A-Za-z]+ | \\[{{}}%!])
  | (?P<name>\b(?:{_NAMED})(?![A-Za-z]) | (?<=[0-9])(?:pi|sqrt)(?![A-Za-z]))
  | (?P<word>(?![xyz]{{2,3}}\^)[^\W\d_]{{2,}}(?:\^\{{?-?[0-9]\}}?)? | [xyz]{{2,3}} | [^\W\d_])
  | (?P<open>[(\[{{])
  | (?P<close>[)\]}}])
  | (?P<sign>\*\*|[-+*/^=<>%!_|])
  | (?P<comma>[,;](?=\s?[-\\(\w]))
  | (?P<space>[ \t]+)
    """,
    re.VERBOSE,
)
_PAIRS = {"(": ")]", "[": ")]", "{": "}"}
_ANCHOR = re.compile(r"####|\banswer\b(?:[^.\n:=]{0,80}?(?:\b(?:is|are|be|equals)\b|[:=]))?", re.IGNORECASE)
_DENIED = re.compile(
    r"(?:(?:\bnot|\bnever|n't|\bcannot)(?:\s+(?:be|equal(?: to)?|is))?"
    r"|\b(?:more|less|greater|fewer|larger|smaller) than)\s*$",
    re.IGNORECASE,
)
_DIRECTLY = re.compile(
    r"[\s:=*]*(?:(?:is|are|be|equals)\b[\s:=]*)?(?:(?:the|just|exactly|about|approximately|simply|an?)\s+)?"
)
_MODULUS = re.compile(r"\s*(?:\(\s*\\?mod\b[^()\n]{0,40}\)|\\p?mod\b\s*(?:\{[^{}\n]{0,40}\}|[0-9]+))")
_RESTATED = re.compile(r"\s?[A-Za-z]+ \((?=[-0-9])")
_LISTED = re.compile(r"\s?(?:,\s?(?:and|or)|,|and|or)\s")
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3}")
_BEHIND_FIRST = re.compile(r"\s?(?:[-+*/^=<>_]|\\[ligcnt]|[,;]\s?\w\s?=)|[(!]|\W*$")
"""What follows a letter with which an expression begins."""
_REFERENCE = re.compile(r"[(\[]\s*-?[0-9]+\s*[)\]]")


@dataclass(frozen=True)
class Expression:
    """An expression in a text."""

    text: str
    start: int
    end: int

    @property
    def is_strong(self) -> bool:
        """Whether it counts if nothing names it the answer: it is no letter, and no number in brackets."""
        return re.search(r"[0-9]|\\[a-z]", self.text) is not None and not _REFERENCE.fullmatch(self.text)


def spelled_out(text: str) -> str:
    """Plain text, with forms of numbers that math-verify does not read written out."""
    text = plain(text)
    for form, written_out in _FORMS:
        text = form.sub(written_out, text)
    return text


def stated(part: str, tagged: bool) -> Iterator[str]:
    """Mathematical expressions that a part of a response may state (`tagged`: inside <answer> tags), the most probable
    one first; nearly always one."""
    text = spelled_out(part.rstrip()[-_LONGEST:])
    box, before = last_box(text)
    if box is not None:
        yield _undelimited(box.strip().rstrip("."))
        return
    prose = _EMPHASIS.sub(r"\2", _NAMES.sub(" answer: ", before).replace("\\$", "$"))
    prose = _MODULUS.sub("", _COLON.sub(r"\1 ", _BORDERS.sub(" ", prose)))
    if tagged and "\n" not in text.strip() and not re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", text)):
        yield _undelimited(text.strip().rstrip("."))
    yield from _in_prose(prose)


def _in_prose(prose: str) -> Iterator[str]:
    found = [one for one in expressions(prose) if not _DENIED.search(prose, max(0, one.start - 30), one.start)]
    anchors = list(_ANCHOR.finditer(prose))
    after = anchors[-1].end() if anchors else len(prose)
    named = [one for one in found if one.start >= after]
    direct = _DIRECTLY.match(prose, after)
    start = direct.end() if direct else after
    spelled = _NUMBER_WORDS.match(prose, start if anchors else len(prose) - len(prose.lstrip()))
    if spelled and (anchors or not prose[spelled.end() :].strip(" .\n")):
        yield str(_spelled_number(spelled[0]))
        return
    if found and not anchors and not prose[: found[0].start].strip():
        whole = _listed(prose, found[0], found)
        if whole is not None and "\n" not in prose.strip():
            yield whole
            return
    chosen = next((one for one in named if one.start == start or (one.is_strong and one.start < after + 120)), None)
    if chosen is None:
        chosen, named = next((one for one in reversed(found) if one.is_strong), found[-1] if found else None), found
    if chosen is None:
        return
    if (whole := _listed(prose, chosen, named)) is not None:
        yield whole
        return
    yield chosen.text
    if chosen.text.endswith("!") and prose[: chosen.start].strip() and not prose[chosen.end :].strip():  # a cry
        yield chosen.text.rstrip("!")
    if restated := _RESTATED.match(prose, chosen.end):
        yield from (one.text for one in named if one.start == restated.end())


def _spelled_number(text: str) -> int:
    total = part = 0
    for word in re.findall("[a-z]+", text.lower()):
        if word == "hundred":
            part = max(part, 1) * 100
        elif word in _SCALES:
            total, part = total + max(part, 1) * _SCALES[word], 0
        else:
            part += _VALUES.get(word, 0)
    return total + part


def _listed(prose: str, chosen: Expression, found: list[Expression]) -> str | None:
    """The list with an expression that ends its sentence, such as `1, 2 and 3`. A comma alone joins none before it."""
    parts, place = [chosen], found.index(chosen)
    for one in reversed(found[:place]):
        joint = _LISTED.fullmatch(prose, one.end, parts[0].start)
        if joint is None or (len(parts) == 1 and joint[0].strip() == ","):
            break
        parts.insert(0, one)
    for one in found[place + 1 :]:
        if not _LISTED.fullmatch(prose, parts[-1].end, one.start):
            break
        parts.append(one)
    ends = re.match(r"\s*(?:\.(?![0-9])|\n|$)", prose[parts[-1].end : parts[-1].end + 20])
    return ", ".join(part.text for part in parts) if len(parts) > 1 and ends else None


def expressions(text: str) -> Iterator[Expression]:
    """The expressions of a text, in order; each as long as it can be."""
    run: list[re.Match[str]] = []
    place = depth = 0
    while place < len(text):
        token = _MATHS.match(text, place)
        if token is None or token.lastgroup is None:
            yield from _finished(text, run)
            run, place, depth = [], place + 1, 0
            continue
        place = token.end()
        is_whole = token.lastgroup in ("formula", "code")
        if not is_whole and _joins(text, token, run, depth):
            run.append(token)
            depth += (token.lastgroup == "open") - (token.lastgroup == "close")
            continue
        yield from _finished(text, run)
        run, depth = [], 0
        if token.lastgroup == "formula" and _WORD.search(token[0]):  # two prices, with words between them
            place = token.start() + 1
        elif is_whole:
            yield Expression(_undelimited(token[0]), token.start(), token.end())
    yield from _finished(text, run)


def _behind_space(run: Sequence[re.Match[str]], end: int) -> str | None:
    """Kind of the last token before `end` if a space follows it."""
    return run[end - 2].lastgroup if end > 1 and run[end - 1].lastgroup == "space" else None


def _joins(text: str, token: re.Match[str], run: list[re.Match[str]], depth: int) -> bool:
    """Whether a token continues, or begins, an expression in which `depth` brackets are open."""
    kind, word = token.lastgroup, token[0]
    last, spaced = run[-1].lastgroup if run else None, _behind_space(run, len(run))
    if kind == "comma":
        return depth > 0
    if kind == "space":
        return last not in (None, "space")
    if kind == "number":
        return spaced != "number"
    if kind != "word" or (word == "i" and spaced == "number"):
        return True
    if word.lower() == "x" and spaced == "number":
        return re.match(r"\s[0-9(]", text[token.end() : token.end() + 2]) is not None
    if len(word) > 1:
        return last not in (None, "space") and re.fullmatch("[xyz]{2,3}", word) is not None
    if not run:
        return _BEHIND_FIRST.match(text[token.end() : token.end() + 9]) is not None
    touches = last in ("number", "close", "sign", "open", "command", "name")
    return touches or spaced in ("sign", "comma", "command", "name")


def _finished(text: str, run: list[re.Match[str]]) -> Iterator[Expression]:
    """The expressions of a run of tokens: it is cut at brackets without their other half, and freed of loose ends."""
    opened: list[int] = []
    cuts: set[int] = set()
    for place, token in enumerate(run):
        if token.lastgroup == "open":
            opened.append(place)
        elif token.lastgroup == "close":
            if opened and token[0] in _PAIRS[run[opened[-1]][0]]:
                opened.pop()
            else:
                cuts.add(place)
    cuts.update(opened)
    part: list[re.Match[str]] = []
    for place, token in enumerate(run):
        if place in cuts:
            yield from _trimmed(text, part)
            part = []
        else:
            part.append(token)
    yield from _trimmed(text, part)


def _trimmed(text: str, part: list[re.Match[str]]) -> Iterator[Expression]:
    while part and _is_loose(part[-1], "%!|"):
        part.pop()
    part = [*dropwhile(lambda one: _is_loose(one, "-|"), part)]
    if any(one.lastgroup in ("number", "word", "name", "command") for one in part):
        written = [f"\\{one[0]} " if one.lastgroup == "name" else one[0] for one in part]
        for n, one in enumerate(part):
            if one[0] in ("x", "X") and _behind_space(part, n) == "number":
                written[n] = r"\times"
        yield Expression("".join(written).replace("**", "^").strip(), part[0].start(), part[-1].end())


def _is_loose(token: re.Match[str], kept: str) -> bool:
    """Whether a token at an end of an expression is none of it; `kept` has the signs that are."""
    return token.lastgroup in ("space", "comma") or (token.lastgroup == "sign" and token[0] not in kept)


def _undelimited(text: str) -> str:
    text = text.strip()
    for opens, closes in (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")):
        if text.startswith(opens) and text.endswith(closes) and len(text) > 2 * len(opens):
            return text[len(opens) : -len(closes)].strip()
    return text.strip("$").strip()


_WRAPPERS = re.compile(r"\\(?:text|mbox|mathrm|mathbf|textbf|textit|textrm|boxed|operatorname)\s*(?=\{)")
_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![A-Za-z])|[{}$*`]|\\[()\[\]]")
_CHOICE = re.compile(
    r"(?:(?:so|thus|hence|therefore|it is|i think|(?:i(?:['’](?:d|ll)| would| will)? )?(?:choose|pick|select|go with)"
    r"|option|choice|answer)(?:[,:]| [-–—])? )*"
    r"[(\[\"'“‘]?([a-z])"
    r"(?:[)\].:,\"'”’]+\s*|\s(?=(?:is (?:the )?(?:correct|right|best|true|answer)|and not)\b|[-–—] )|$)"
)
"""The letter of a choice, in the form of `words`: (b), b. and b) paris."""
_ANOTHER = re.compile(
    r"[)\].]*\s*(?:(?:,|/|or\b|and\b)\s*)+[(\[]?(?:[b-hj-z](?![\w'])|[ai](?=[)\].,]|$))"
    r"|[)\]],?\s?[(\[][a-z][)\]]|\.\s[a-z]\."
)
"""What follows the letter of a choice if it is one of several: b or c, (b), (c)."""
_NAMED_WORDS = re.compile(
    r"####|\b(?:answer|option|choice)\b(?!\s\(?[a-z]\)?\s(?:is|are)\b)[^.\n:=]{0,60}?(?:\b(?:is|are|be)\b\s*:?|[:=])",
    re.IGNORECASE,
)
_OPTION = re.compile(r"\W{0,3}([A-J])[).:]\s")
"""A line that repeats an option of the question, if the line before it repeats another."""
_NOT_BUT = re.compile(r"not \S{1,20},? but ")
_CLAUSE = re.compile(r"\n|[.!](?=\s|$)|,? (?:because|since|as|which|so|not)\b")


def words(text: str) -> str:
    """The form in which texts are compared: without LaTeX, formatting, repeated white space, case and a full stop."""
    text = _SPACING.sub("", _WRAPPERS.sub("", plain(text)))
    return " ".join(text.casefold().split()).rstrip(".!").strip()


def stated_words(part: str) -> str:
    """What a response states as its answer, in the form of `words`; empty if nothing. That is the last box, what the
    last "answer is" or "answer:" names, or the last line."""
    box, before = last_box(part.rstrip()[-_LONGEST:])
    if box is not None:
        return words(box)
    text = _EMPHASIS.sub(r"\2", _NAMES.sub(" answer: ", plain(before))).strip()
    anchors = list(_NAMED_WORDS.finditer(text))
    if not anchors:
        *_, before, last = ["", "", *filter(None, map(str.strip, text.split("\n")))]
        options = _OPTION.match(before), _OPTION.match(last)
        return "" if options[0] and options[1] and options[0][1] != options[1][1] else words(last)
    named = _NOT_BUT.sub("", text[anchors[-1].end() :].lstrip(": \n"))
    return words(next((one for one in _CLAUSE.split(named) if words(one)), ""))


def chosen(text: str, right: str) -> str:
    """What a text in the form of `words` chooses: its letter if the right answer is one, else the rest."""
    found = _CHOICE.match(text)
    if found and _ANOTHER.match(text, found.end(1)):
        found = None
    if re.fullmatch(r"\W?[a-z]\W?", right):
        return found[1] if found else ""
    return text[found.end() :] if found and found.end() < len(text) else text


def same_words(right: str, said: str) -> bool:
    """Whether two texts in the form of `words` are the same answer; the letter of a choice stands for it."""
    return bool(said) and (right == said or chosen(right, right) == chosen(said, right))
