"""Figures as people read them."""


def number(value: float | int | None, digits: int = 0) -> str:
    """1234567 -> `1,234,567`; None -> `-`"""
    return "-" if value is None else f"{value:,.{digits}f}"


def bytes_in_words(size: float) -> str:
    """Bytes in decimal units, three significant figures: 11_744_051_200_000 -> `11.7 TB`"""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def seconds_in_words(seconds: float) -> str:
    """75.2 -> `1 min 15 s`"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
