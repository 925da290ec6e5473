#include "llmc/comm/transport.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "llmc/core/standard_streams.h"
#include "llmc/core/text.h"

namespace llmc {
void abort_job(Transport& transport, std::string_view line) {
    std::fflush(stdout);
    // A single write, so that lines of several processes do not mix.
    const std::string text = fmt::format("{}{}\n", line_start(STDERR_FILENO), line);
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
    transport.abort();
    std::_Exit(1);
}

void fail_job(Transport& transport, std::string_view what) {
    bool reports = true;
    try {
        reports = transport.reports_failure();
    } catch (const std::exception&) {
        // The transport itself has failed.
    }
    if (!reports) transport.give_way();
    abort_job(transport, fmt::format("error: {}", one_line(what)));
}

}  // namespace llmc
