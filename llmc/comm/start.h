// How this process was started, according to its environment: by mpirun or another PMI launcher; with RANK,
// WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace llmc {

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

}  // namespace llmc
