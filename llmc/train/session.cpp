#include "llmc/train/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <exception>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/standard_streams.h"
#include "llmc/device/device.h"
#include "llmc/io/files.h"
#include "llmc/train/command_line.h"
#include "llmc/train/same_options.h"

namespace llmc {

Session::Environment::Environment(int argc, char** argv) {
    // If this signal is ignored, a write beyond the file-size limit (ulimit -f) returns an error, which is
    // reported, instead of killing the process.
    std::signal(SIGXFSZ, SIG_IGN);
    fill_standard_streams();
    // Generation runs hundreds of brief loops for each token. The options are read later, so that of a configuration
    // file is not known here.
    const std::span<char*> arguments(argv, static_cast<std::size_t>(argc));
    const bool generates = std::ranges::any_of(arguments, [](std::string_view argument) {
        return argument == "--generate" || argument == "--chat";
    });
    let_waiting_threads_sleep(argv, generates);
}

Session::Session(int argc, char** argv)
    : argc_(argc), argv_(argv), environment_(argc, argv), console_(job_.world().rank() == 0) {}

void Session::guard(const std::function<void()>& program) {
    try {
        program();
        // A stopped run keeps its exit status even if its output was lost, because a scheduler uses the
        // status to restart it.
        if (!is_stopping_) console_.require_written();
    } catch (const std::exception&) {
        console_.remove_progress();
        fail();
    }
    if (const std::string lost = console_.what_was_lost(); is_stopping_ && !lost.empty())
        write_error(fmt::format("note: {}\n", lost));
}

int Session::finish() {
    if (is_stopping_) job_.end(stopped_status);
    return 0;
}

// Ends the job with the line of the exception that is being handled.
void Session::fail() {
    try {
        throw;
    } catch (const DeviceFault& fault) {
        const bool suggests_cuda_sync = has_options_ && !options_.cuda_sync;
        job_.fail(
            fmt::format("{}{}", fault.what(),
                        suggests_cuda_sync ? "; to find out which kernel failed, use --cuda-sync" : ""));
    } catch (const UserError& fault) {
        job_.fail(has_options_ ? with_place(options_, fault.what()) : fault.what());
    } catch (const std::exception& fault) {
        job_.fail(fault.what());
    }
}

bool Session::read_options() {
    std::string text;
    std::optional<Options> options = parse_options(argc_, argv_, text);
    require_same_options(world(), options ? &*options : nullptr);
    has_options_ = options.has_value();
    if (has_options_) {
        options_ = *std::move(options);
        console_.settle(options_.log_every, options_.quiet);
    } else {
        console_.text(text);
    }
    // With --generate, standard output has the text alone.
    if (has_options_ && !options_.generate && is_rank_zero()) {
        signals_.answer_with(
            console_.over_progress(
                "Stopping (training finishes its step and saves first); press Ctrl-C again to stop now\n"),
            console_.over_progress(""));
    }
    return has_options_;
}

void Session::read_options_again() {
    std::string unused;
    options_ = *parse_options(argc_, argv_, unused, removed_options(), damages_);
    console_.settle(options_.log_every, options_.quiet);
}

void Session::pass_over(const std::filesystem::path& checkpoint, const std::string& damage) {
    damages_.emplace(plain_path(checkpoint).string(), damage);
    read_options_again();
}

std::string Session::program() const { return program_as_called(arguments()); }

bool Session::ask_to_stop(Done& done) {
    std::array<double, 3> counts = {signals_.here() ? 1.0 : 0.0, done.well, done.failed};
    world().all_reduce({reinterpret_cast<std::byte*>(counts.data()), DType::fp64, {std::ssize(counts)}});
    done = {counts[1], counts[2]};
    return is_stopping_ = is_stopping_ || counts[0] > 0;
}

bool Session::ask_to_stop() { return is_stopping_ = is_stopping_ || signals_.anywhere(world()); }

bool Session::stops_early() {
    // Generation stops by itself: it prints what it has, and nothing else may stand on standard output.
    if (options_.generate || !ask_to_stop()) return false;
    console_.note("stopped before the first step: nothing was written");
    return true;
}

}  // namespace llmc
