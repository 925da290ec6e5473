#include "llmc/comm/transport.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "llmc/core/text.h"

namespace llmc {
void abort_job(Transport& transport, std::string_view line) {
    std::fflush(stdout);
    // One write, so that lines of several processes do not mix.
    const std::string text = fmt::format("{}\n", line);
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
    transport.abort();
    std::_Exit(1);
}

void fail_job(Transport& transport, std::string_view what) {
    bool speaks = true;
    try {
        speaks = transport.speaks_of_failure();
    } catch (const std::exception&) {
        // What carries messages is itself what failed.
    }
    if (!speaks) transport.give_way();
    abort_job(transport, fmt::format("error: {}", one_line(what)));
}

}  // namespace llmc
