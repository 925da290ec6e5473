// A process of the job, from its start to its exit status: standard streams, signals, the other ranks, and the
// console. Once the process has joined the job, an error becomes a line and ends the job here only.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "llmc/comm/bootstrap.h"
#include "llmc/train/console.h"
#include "llmc/train/options.h"
#include "llmc/train/stop.h"

namespace llmc {

class Session {
  public:
    // Joins the other processes of the job. Ends the process with one line if it cannot.
    Session(int argc, char** argv);

    // Calls `program`. An exception ends the whole job here, with one line. The caller declares the objects
    // that own GPU memory outside `program`: that memory cannot be freed while the GPU waits for a rank that
    // is gone.
    void guard(const std::function<void()>& program);
    // Returns 0, the exit status for main. If the run was asked to stop, ends the process here with
    // stopped_status (stop.h).
    int finish();

    // Reads the command line and --config, and compares them with those of the other ranks. False: --help or
    // --version was asked for, and is printed.
    bool read_options();
    // Reads them once more, because the run that they resume may have gone on meanwhile.
    void read_options_again();
    // Reads them once more, for --resume to take another checkpoint than this one, which is damaged.
    void pass_over(const std::filesystem::path& checkpoint, const std::string& damage);
    const Options& options() const { return options_; }
    std::span<const char* const> arguments() const { return {argv_, static_cast<std::size_t>(argc_)}; }
    // How the program was called, for commands that a person may type (command_line.h).
    std::string program() const;

    Job& job() { return job_; }
    HostCommunicator& world() { return job_.world(); }
    bool is_rank_zero() { return world().rank() == 0; }
    Console& console() { return console_; }
    StopSignals& signals() { return signals_; }

    // How many ranks have done what they do beside training, or failed.
    struct Done {
        double well = 0, failed = 0;
    };
    // Whether a signal has asked any rank to stop. All ranks call it together and receive the same answer. Also
    // replaces each rank's counts by their sums.
    bool ask_to_stop(Done& done);
    bool ask_to_stop();
    // The last answer of ask_to_stop(), without communication.
    bool is_stopping() const { return is_stopping_; }
    // Like ask_to_stop(), for use before the first step. If the answer is yes, prints a note that nothing was
    // written. Always false with --generate, which stops by itself.
    bool stops_early();

  private:
    [[noreturn]] void fail();

    // Constructed before the members below, which rely on it.
    struct Environment {
        Environment(int argc, char** argv);
    };

    int argc_;
    char** argv_;
    Environment environment_;
    StopSignals signals_;
    Job job_;
    Console console_;
    Options options_;
    std::map<std::string, std::string> damages_;
    bool has_options_ = false, is_stopping_ = false;
};

}  // namespace llmc
