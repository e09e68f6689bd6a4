"""Words that a mirror image makes false: sides, and the names of digits and letters."""

import re
from collections.abc import Iterator, Mapping, Sequence

SIDES = (
    *("left", "right", "leftward", "rightward", "leftwards", "rightwards", "clockwise", "anticlockwise"),
    *("counterclockwise", "links", "rechts", "linke", "linker", "linkes", "linken", "linkem", "rechte", "rechter"),
    *("rechtes", "rechten", "rechtem", "gauche", "gauches", "droite", "droites", "droit", "izquierda", "izquierdo"),
    *("izquierdas", "izquierdos", "derecha", "derecho", "derechas", "derechos", "sinistra", "sinistro", "destra"),
    *("destro", "esquerda", "esquerdo", "direita", "direito", "lewo", "lewa", "lewy", "prawo", "prawa", "prawy"),
    *("\u043b\u0435\u0432\u043e", "\u043b\u0435\u0432\u044b\u0439", "\u043b\u0435\u0432\u0430\u044f"),
    *("\u0441\u043b\u0435\u0432\u0430", "\u0441\u043f\u0440\u0430\u0432\u0430", "\u043f\u0440\u0430\u0432\u044b\u0439"),
    *(
        "\u043f\u0440\u0430\u0432\u0430\u044f",
        "\u043d\u0430\u043b\u0435\u0432\u043e",
        "\u043d\u0430\u043f\u0440\u0430\u0432\u043e",
    ),
)
"""Words for sides, which a mirror image makes false."""
SIDES_WITHOUT_SPACES = ("\u5de6", "\u53f3", "\uc67c\ucabd", "\uc624\ub978\ucabd")
"""Words for sides in Chinese, Japanese and Korean, which stand without spaces around them."""
SIDE = re.compile(
    rf"(?<![^\W_])(?:{'|'.join(SIDES)})(?![^\W_])|{'|'.join(SIDES_WITHOUT_SPACES)}",
    re.IGNORECASE,
)
SYMBOL = re.compile(
    r"(?:(?:digit|number|letter|character|char|upper|lower|capital|ziffer|zahl|buchstabe|chiffre|lettre)[\W_]*)*"
    r"(?:[^\W_]|zero|one|two|three|four|five|six|seven|eight|nine)(?:[\W_]*(?:upper|lower|capital))?"
    r"|.|(?:u\+?|uni|0x)[0-9a-f]{4,6}",
    re.IGNORECASE,
)
"""The name of a class of digits, letters or signs, in words or as a number of Unicode."""
FEWEST_FILES = 8  # number of files with such names below which their names mean nothing
MIN_NAMED = 0.01  # least share of captions that name a side: a single "right" among thousands may mean anything


def unmirrored_words(
    class_names: Sequence[str], captions: Mapping[str, Sequence[object]], stems: Sequence[str] = ()
) -> str | None:
    """Describe the classes, captions or names of files that are false for a mirror image; None if there are none.

    Args:
        class_names: names of the classes.
        captions: texts of the pictures by column.
        stems: names of the files without folders and suffixes.
    """
    if len(stems) >= FEWEST_FILES and all(map(SYMBOL.fullmatch, stems)) and not all(stem.isdecimal() for stem in stems):
        return f"the files have the names of letters or signs, such as {stems[0]}"
    sided = [stem for stem in stems if names_side(stem)]
    if len(sided) >= max(FEWEST_FILES, len(stems) / 2):
        return f"{len(sided):,} files name a side, such as {sided[0]}"
    if len(class_names) > 1 and all(SYMBOL.fullmatch(name) for name in class_names):
        return f"the classes are digits or letters, such as {class_names[0]}"
    for name in class_names:
        if names_side(name):
            return f"the class {name} names a side"
    for column, values in captions.items():
        texts = [text for value in values for text in _texts_of(value)]
        found = [text for text in texts if names_side(text)]
        if found and len(found) >= MIN_NAMED * len(texts):
            return f"{len(found):,} texts of the column {column} name a side, such as {found[0][:60]}"
    return None


def names_side(text: str) -> bool:
    """Return whether a text or the name of a class names a side."""
    return SIDE.search(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)) is not None


def _texts_of(value: object) -> Iterator[str]:
    """Yield the texts in the cell of a table."""
    values = value if isinstance(value, list | tuple) else [value]
    yield from (each for each in values if isinstance(each, str))
