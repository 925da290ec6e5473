#include "llmc/comm/bootstrap.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/comm/machine_lock.h"
#include "llmc/comm/rendezvous.h"
#include "llmc/comm/transport.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"

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

CoreMask own_mask() {
    CoreMask mask;
    cpu_set_t* set = CPU_ALLOC(mask.size());
    const std::size_t bytes = CPU_ALLOC_SIZE(mask.size());
    CPU_ZERO_S(bytes, set);
    if (sched_getaffinity(0, bytes, set) == 0)
        for (std::size_t core = 0; core < mask.size(); ++core) mask[core] = CPU_ISSET_S(core, bytes, set);
    CPU_FREE(set);
    return mask;
}

namespace {

// The machine and the cores of a rank. Ranks with the same host name are on one machine.
struct Place {
    std::array<char, 256> machine{};
    CoreMask mask;
};

Place own_place() {
    Place place;
    check(gethostname(place.machine.data(), place.machine.size() - 1) == 0, "a machine has a name");
    place.mask = own_mask();
    return place;
}

std::unique_ptr<Transport> transport_for(const Start& start) {
    if (start.by == Start::By::mpi) return join_mpi_job();
    if (start.size == 1) return make_lone_transport();
    return make_tcp_transport(start.rank,
                              find_peers({.rank = start.rank,
                                          .size = start.size,
                                          .host = start.master_host,
                                          .port = start.master_port,
                                          .listener = start.listener,
                                          .patience = start.patience,
                                          .version = fmt::format("{} ({})", version(), commit())}));
}

// The number of other processes of the job, if WORLD_SIZE gives it. That variable may itself be wrong.
std::optional<int> others_of_job() {
    const char* given = std::getenv("WORLD_SIZE");
    const int size = whole_number<int>(given != nullptr ? given : "").value_or(0);
    return size > 0 ? std::optional(size - 1) : std::nullopt;
}

}  // namespace

int share_of_cores(std::span<const CoreMask> masks, int rank) {
    const CoreMask& own = masks[static_cast<std::size_t>(rank)];
    double share = 0;
    for (std::size_t core = 0; core < own.size(); ++core)
        if (own[core])
            share += 1.0 / static_cast<double>(
                               std::ranges::count_if(masks, [&](const CoreMask& m) { return m[core]; }));
    // Six cores shared by three ranks give two each; the small term absorbs the rounding of 1/3.
    return std::max(1, static_cast<int>(share + 1e-6));
}

Job::Job(const ExchangeOptions& options) {
    Start start;
    try {
        start = how_started([](const char* name) { return std::getenv(name); }, has_mpi());
        transport_ = transport_for(start);
    } catch (const EndsQuietly&) {
        std::exit(1);
    } catch (const UserError& fault) {
        print_once_per_machine(fmt::format("error: {}\n", one_line(fault.what())), others_of_job());
        std::exit(1);
    }
    world_ = std::make_unique<HostCommunicator>(*transport_, options);
    try {
        find_place(start);
    } catch (const std::exception& fault) {
        fail(fault.what());
    }
}

void Job::find_place(const Start& start) {
    const std::vector<Place> places = values_of_ranks(*world_, own_place());
    const Place& own = places[static_cast<std::size_t>(world_->rank())];
    std::vector<CoreMask> masks;
    for (const Place& place : places) {
        if (place.machine != own.machine) continue;
        if (&place == &own) local_rank_ = static_cast<int>(masks.size());
        masks.push_back(place.mask);
    }
    cores_ = share_of_cores(masks, local_rank_);
    // The launcher's values have precedence: two machines may share a host name, and one may have several
    // (containers).
    local_size_ = start.local_size.value_or(static_cast<int>(masks.size()));
    local_rank_ = start.local_rank.value_or(local_rank_);
}

Job::~Job() {
    try {
        // MPI_Finalize waits without a limit. This barrier has one, and after it every rank soon calls
        // MPI_Finalize.
        world_->barrier();
    } catch (const std::exception& error) {
        fail(error.what());
    }
    transport_->finish();
}

void Job::fail(std::string_view what) const { fail_job(*transport_, what); }

void Job::end(int status) const {
    world_->barrier();
    transport_->end(status);
    std::_Exit(status);
}

}  // namespace llmc
