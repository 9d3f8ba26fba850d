"""Text from elsewhere on its way to a terminal: env names, failure messages, addresses, what a server answered.

Such text may hold control characters, which a terminal obeys: they clear the screen, change its title, or hide what
else is on the line. They are shown as `�` instead. Must stay light: the command line imports it for every error.
"""


def plain(text: str) -> str:
    """One line without control characters, line ends included."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "�" for char in text)


def plain_lines(text: str) -> str:
    """The same for text of several lines, which stay."""
    return "\n".join(plain(line.expandtabs()) for line in text.split("\n"))
