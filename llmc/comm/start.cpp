#include "llmc/comm/start.h"

#include <unistd.h>

#include <array>
#include <cstring>
#include <limits>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {
namespace {

// Variables of Open MPI, PMIx and PMI. Slurm, MPICH and others set the latter two.
constexpr std::array variables_of_mpi = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"};

constexpr int most_ranks = 100'000;

constexpr std::string_view advice =
    "give each process its own RANK, and all the same WORLD_SIZE, MASTER_ADDR (the machine of RANK=0) and "
    "MASTER_PORT (free there)";

std::string_view value_of(const Variables& variables, const char* name) {
    const char* value = variables(name);
    return value == nullptr ? "" : value;
}

int number_of(const Variables& variables, const char* name, int least, int most) {
    const std::string_view text = value_of(variables, name);
    if (text.empty()) user_error("{} is not set; {}", name, advice);
    const auto number = whole_number<int>(text);
    if (!number || *number < least || *number > most)
        user_error("{}={} is not a whole number from {} to {}; {}", name, text, least, most, advice);
    return *number;
}

std::optional<int> number_if_given(const Variables& variables, const char* name, int least, int most) {
    if (value_of(variables, name).empty()) return std::nullopt;
    return number_of(variables, name, least, most);
}

}  // namespace

bool started_by_launcher(const Variables& variables) {
    // Processes that a rank starts inherit the variable, but have another parent.
    return whole_number<int>(value_of(variables, launcher_variable)) == static_cast<int>(getppid());
}

Start how_started(const Variables& variables, bool has_mpi) {
    Start start;
    const bool named = !value_of(variables, "RANK").empty() || !value_of(variables, "WORLD_SIZE").empty();
    for (const char* name : variables_of_mpi)
        if (!value_of(variables, name).empty() && (has_mpi || !named)) start.by = Start::By::mpi;
    if (start.by == Start::By::mpi) return start;
    if (!named) {
        const std::string_view tasks = value_of(variables, "SLURM_STEP_NUM_TASKS");
        if (whole_number<int>(tasks).value_or(1) > 1) {
            user_error(
                "srun started {} processes (SLURM_STEP_NUM_TASKS), and each would train alone and write the "
                "same files; {} (or WORLD_SIZE=1 and RANK=0 to make each a separate job)",
                tasks, advice);
        }
        return start;
    }

    start.by = Start::By::variables;
    start.size = number_of(variables, "WORLD_SIZE", 1, most_ranks);
    start.rank = number_of(variables, "RANK", 0, start.size - 1);
    start.local_size = number_if_given(variables, "LOCAL_WORLD_SIZE", 1, start.size);
    start.local_rank = number_if_given(variables, "LOCAL_RANK", 0, start.local_size.value_or(start.size) - 1);
    if (start.rank == 0 && started_by_launcher(variables))
        start.listener = number_if_given(variables, listener_variable, 0, std::numeric_limits<int>::max());
    constexpr int day = 86'400;
    if (const auto seconds = number_if_given(variables, "TRAIN_GPT_CONNECT_SECONDS", 1, day))
        start.patience = std::chrono::seconds(*seconds);
    if (start.size == 1) return start;

    start.master_host = value_of(variables, "MASTER_ADDR");
    if (start.master_host.empty()) user_error("MASTER_ADDR is not set; {}", advice);
    start.master_port = static_cast<std::uint16_t>(number_of(variables, "MASTER_PORT", 1, 65'535));
    // torchrun often uses MASTER_PORT itself and says so by this variable. The job then uses the next port.
    if (value_of(variables, "TORCHELASTIC_USE_AGENT_STORE") == "True")
        start.master_port = start.master_port == 65'535 ? 65'534 : start.master_port + 1;
    return start;
}

}  // namespace llmc
