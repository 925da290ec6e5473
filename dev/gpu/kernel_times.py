"""The share of time that a GPU spent outside kernels, from when each began and ended (dev/gpu/kernel_times.cpp writes that)."""


def read(path):
    """[(begin, end)] in nanoseconds; a last line that was cut short is left out."""
    pairs = []
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) == 2:
            pairs.append((int(words[0]), int(words[1])))
    return pairs


def outside(spans, length=None):
    """The share in which nothing ran: of the last time of that length, in the unit of the spans, or of all that they cover."""
    spans = sorted(spans)
    end = max(stop for _, stop in spans)
    start = spans[0][0] if length is None else max(spans[0][0], end - length)
    busy, reached = 0, start
    for begin, stop in spans:
        begin = max(begin, reached)
        if stop > begin:
            busy += stop - begin
            reached = stop
    return 1 - busy / (end - start)
