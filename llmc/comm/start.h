// How this process was started, by the variables of its environment: by mpirun or another launcher that speaks PMI,
// with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or alone.
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
    // The rest is by variables.
    int rank = 0;
    int size = 1;
    std::string master_host;  // empty where the process is the only one
    std::uint16_t master_port = 0;
    // Where given.
    std::optional<int> local_rank;
    std::optional<int> local_size;
    // How long the processes wait for one another.
    std::chrono::duration<double> patience = std::chrono::minutes(5);
};

// The value of a variable; null without it.
using Variables = std::function<const char*(const char* name)>;

// has_mpi: whether the program was built with MPI, which then has precedence. A UserError where variables are missing
// or wrong.
Start how_started(const Variables& variables, bool has_mpi);

}  // namespace llmc
