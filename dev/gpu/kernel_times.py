"""The share of time that a GPU spent outside kernels, from their starts and ends (written by dev/gpu/kernel_times.cpp)."""


def read(path):
    """[(begin, end)] in nanoseconds; ignores an incomplete last line."""
    pairs = []
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) == 2:
            pairs.append((int(words[0]), int(words[1])))
    return pairs


def outside(spans, length=None):
    """The share of time in which nothing ran.

    `length` is the last part of the time that counts, in the unit of the spans; None counts all that they cover.
    """
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
