#include "llmc/comm/transport.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include "llmc/core/text.h"

namespace llmc {
namespace {

// How long a notice that a rank has failed may be under way.
constexpr std::chrono::milliseconds crossing_time{100};

// Often several ranks fail, at about the same moment or one after the other: the first one speaks, and of those
// whose notices cross, the lowest.
bool speaks_of_failures(Transport& transport) {
    const auto lowest_failed = [&] {
        int rank = 0;
        while (rank < transport.size() &&
               (rank == transport.rank() || !transport.has_told(rank, Notice::failed)))
            ++rank;
        return rank;
    };
    if (lowest_failed() < transport.size()) return false;
    transport.tell_others(Notice::failed);
    if (transport.size() == 1) return true;
    const auto end = std::chrono::steady_clock::now() + crossing_time;
    int lowest = transport.size();
    while (std::chrono::steady_clock::now() < end) {
        lowest = lowest_failed();
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return lowest > transport.rank();
}

}  // namespace

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
        speaks = speaks_of_failures(transport);
    } catch (const std::exception&) {
        // What carries messages is itself what failed.
    }
    if (!speaks) transport.give_way();
    abort_job(transport, fmt::format("error: {}", one_line(what)));
}

}  // namespace llmc
