// How a process becomes a member of its job. Its environment says how it was started: by mpirun or another
// PMI launcher; with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or alone. It then joins the job over MPI
// or TCP. A Job has the communicator of all ranks and this process's share of its machine.
#pragma once

#include <bitset>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "llmc/comm/exchange.h"
#include "llmc/comm/host_communicator.h"

namespace llmc {

class Transport;

struct Start {
    enum class By { itself, mpi, variables };
    By by = By::itself;
    // The rest is for By::variables only.
    int rank = 0;
    int size = 1;
    std::string master_host;  // empty if the process is the only one
    std::uint16_t master_port = 0;
    // Empty if not given.
    std::optional<int> local_rank;
    std::optional<int> local_size;
    // The descriptor of a socket that already listens at master_port; for rank 0 under launcher.h.
    std::optional<int> listener;
    // How long the processes wait for each other.
    std::chrono::duration<double> patience = std::chrono::minutes(5);
};

// Returns the value of a variable; null if it is not set.
using Variables = std::function<const char*(const char* name)>;

// Set by launcher.h for the ranks that it starts: the launcher's process, and rank 0's listening socket.
inline constexpr const char* launcher_variable = "TRAIN_GPT_LAUNCHER";
inline constexpr const char* listener_variable = "TRAIN_GPT_LISTENER";

// Whether the launcher of launcher.h, this process's parent, started this process.
bool started_by_launcher(const Variables& variables);

// Reads how this process was started. has_mpi: whether the program was built with MPI, which then has
// precedence. UserError if variables are missing or wrong.
Start how_started(const Variables& variables, bool has_mpi);

// The cores that a process may run on, by number.
using CoreMask = std::bitset<8192>;
CoreMask own_mask();  // of this process

// The number of cores that `rank` may count as its own, at least 1. `masks` has the masks of all ranks on its
// machine. A core that several ranks may use is divided equally among them.
int share_of_cores(std::span<const CoreMask> masks, int rank);

// This process as a member of the job. The destructor waits for all ranks. An error that a rank cannot
// recover from must therefore be caught during the object's life and passed to fail().
class Job {
  public:
    // If the processes do not find each other, one of them prints a line that begins with `error: `, and all
    // exit with status 1.
    explicit Job(const ExchangeOptions& options = {});
    ~Job();
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    HostCommunicator& world() { return *world_; }
    Transport& transport() { return *transport_; }

    // Rank among the processes on this machine, in the order of the job's ranks, and their number.
    int local_rank() const { return local_rank_; }
    int local_size() const { return local_size_; }
    // This process's share of the cores: the default number of compute threads.
    int cores() const { return cores_; }

    // Prints `error: what` once and ends the whole job with status 1. One rank may call it, or several, or
    // all.
    [[noreturn]] void fail(std::string_view what) const;

    // Ends the whole job silently with a nonzero status. All ranks call it, after all output is written.
    [[noreturn]] void end(int status) const;

  private:
    void find_place(const Start& start);

    std::unique_ptr<Transport> transport_;
    std::unique_ptr<HostCommunicator> world_;
    int local_rank_ = 0;
    int local_size_ = 1;
    int cores_ = 1;
};

}  // namespace llmc
