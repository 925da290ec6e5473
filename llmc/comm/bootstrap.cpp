#include "llmc/comm/bootstrap.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "llmc/comm/machine_lock.h"
#include "llmc/comm/start.h"
#include "llmc/comm/transport_mpi.h"
#include "llmc/comm/transport_tcp.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"

namespace llmc {
namespace {

// The machine and the cores of a rank. Ranks with the same host name are on one machine.
struct Place {
    std::array<char, 256> machine{};
    CoreMask mask;
};

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

Place own_place() {
    Place place;
    check(gethostname(place.machine.data(), place.machine.size() - 1) == 0, "a machine has a name");
    place.mask = own_mask();
    return place;
}

std::vector<Place> places_of_all(HostCommunicator& world) {
    static_assert(sizeof(Place) % sizeof(std::int32_t) == 0 && std::is_trivially_copyable_v<Place>);
    constexpr auto words = static_cast<std::int64_t>(sizeof(Place) / sizeof(std::int32_t));
    std::vector<Place> places(static_cast<std::size_t>(world.size()));
    places[static_cast<std::size_t>(world.rank())] = own_place();
    const Tensor all{reinterpret_cast<std::byte*>(places.data()), DType::int32, {world.size(), words}};
    world.all_gather(all, all.slice(world.rank(), 1));
    return places;
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
    const char* size = std::getenv("WORLD_SIZE");
    return size != nullptr && std::atoi(size) > 0 ? std::optional(std::atoi(size) - 1) : std::nullopt;
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
    const std::vector<Place> places = places_of_all(*world_);
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
