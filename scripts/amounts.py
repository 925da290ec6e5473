"""Numbers as text for people, for plots and the live view."""


def short(number):
    """837,632 -> 838 k"""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.{3 if number < 999.5 * size else 4}g} {unit}"
    return f"{number:.3g}"


def decimal(loss):
    """2.345, or 1.23e+09"""
    return f"{loss:.3f}" if abs(loss) < 1e5 else f"{loss:.3g}"


def bytes_text(size):
    """44,040,192 -> 42.0 MiB"""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1023.5 or unit == "TiB":
            return f"{size:.{0 if unit == 'B' or size >= 99.95 else 1}f} {unit}"
        size /= 1024


def duration_text(hours):
    """1.5 -> 90 min"""
    minutes = hours * 60
    if minutes < 2:
        return f"{minutes * 60:.3g} s"
    if hours < 2:
        return f"{minutes:.3g} min"
    return f"{hours:.3g} h"


def clipped(text, width):
    """The text, shortened to `width` characters by leaving out its middle: names differ at their beginnings and
    ends."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[:width - 1 - end]}…{text[-end:]}"


def time_unit(hours):
    """The unit in which a time is a convenient number, and how many of these units an hour has."""
    for unit, in_an_hour in (("hours", 1), ("minutes", 60)):
        if hours * in_an_hour >= 2:
            return unit, in_an_hour
    return "seconds", 3600


def clock(seconds):
    """3723 -> 1:02:03"""
    seconds = int(seconds + 0.5)
    days, clock = divmod(seconds, 86400)
    hours, minutes = clock // 3600, clock // 60 % 60
    text = f"{hours}:{minutes:02}:{clock % 60:02}" if hours or days else f"{minutes}:{clock % 60:02}"
    return f"{days} d {text}" if days else text
