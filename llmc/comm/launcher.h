// Starts the processes of a job on this machine: `./train_gpt --processes N`. The process that was called is
// the launcher. It starts N copies of the program as ranks, passes signals on to them, and waits for them.
// The ranks find each other over TCP (bootstrap.h, rendezvous.h).
#pragma once

#include <optional>
#include <string_view>

namespace llmc {

// The option that asks for a launcher, without its dashes.
inline constexpr std::string_view processes_option = "processes";

// Takes --processes N out of the arguments. If N > 1, and this process is not one of the N: runs the job and
// returns its exit status. Otherwise returns nothing, and the caller goes on as one process. The ranks do not
// see the option.
//
// Call it first in main(), before any thread exists. A wrong N prints one line and gives the status 1.
//
// Signals to the launcher:
// - The first SIGINT, SIGHUP, SIGTERM or SIGUSR1 becomes SIGUSR1 for every rank. A rank that has not yet called
//   accept_stop_signals() receives it then, so no signal is lost.
// - The second one kills all ranks. The status is then 128 plus the signal's number.
// - SIGTSTP (Ctrl-Z) stops all ranks and the launcher, and SIGCONT continues them.
// If the launcher is killed, the system kills its ranks. If a rank fails, the others have ten seconds to say
// why; the status is that of the first rank that failed.
std::optional<int> launch_processes(int& argc, char** argv);

// Lets a rank receive SIGINT, SIGHUP, SIGTERM and SIGUSR1, which the launcher blocks in the ranks that it
// starts. A program calls this when it handles these signals.
void accept_stop_signals();

}  // namespace llmc
