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

void fail_job(Transport& transport, std::string_view what, std::span<const int> silent) {
    bool reports = true;
    try {
        reports = transport.reports_failure(silent);
    } catch (const std::exception&) {
        // The transport itself has failed.
    }
    if (!reports) transport.give_way();
    std::fflush(stdout);
    write_error(fmt::format("{}error: {}\n", line_start(STDERR_FILENO), one_line(what)));
    transport.abort();
    std::_Exit(1);
}

}  // namespace llmc
