#include "llmc/comm/bootstrap.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "llmc/core/text.h"

namespace llmc {
namespace {

// What a rank tells the others of where it runs. Ranks with one processor name are on one machine.
struct Place {
    std::array<char, MPI_MAX_PROCESSOR_NAME> machine{};
    CoreMask mask;
};

// How long a message that says that a rank has failed may be under way, and how long a rank that has failed
// waits to be ended by the one that speaks.
constexpr std::chrono::milliseconds crossing_time{100};
constexpr std::chrono::seconds patience{10};

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
    int length = 0;
    check_mpi(MPI_Get_processor_name(place.machine.data(), &length), "MPI_Get_processor_name");
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

}  // namespace

int share_of_cores(std::span<const CoreMask> masks, int rank) {
    const CoreMask& own = masks[static_cast<std::size_t>(rank)];
    double share = 0;
    for (std::size_t core = 0; core < own.size(); ++core)
        if (own[core])
            share += 1.0 / static_cast<double>(
                               std::ranges::count_if(masks, [&](const CoreMask& m) { return m[core]; }));
    // Six cores among three are two, whatever the rounding of 1/3.
    return std::max(1, static_cast<int>(share + 1e-6));
}

Job::Job(const ExchangeOptions& options) {
    // Without it Open MPI adds eight lines of its own to the one line with which a failing job ends.
    setenv("OMPI_MCA_orte_execute_quiet", "1", 0);
    // A program started alone, without mpirun, needs no daemon beside it.
    setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
    // Nor the folder under /tmp in which mpirun's processes find each other: programs started alone at the same time
    // would remove it from under one another.
    if (std::getenv("OMPI_COMM_WORLD_RANK") == nullptr) setenv("OMPI_MCA_orte_create_session_dirs", "0", 0);
    int provided = 0;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    check(provided >= MPI_THREAD_SERIALIZED, "MPI does not bear threads");
    world_ = std::make_unique<HostCommunicator>(options);

    const std::vector<Place> places = places_of_all(*world_);
    const Place& own = places[static_cast<std::size_t>(world_->rank())];
    std::vector<CoreMask> masks;
    for (const Place& place : places) {
        if (place.machine != own.machine) continue;
        if (&place == &own) local_rank_ = static_cast<int>(masks.size());
        masks.push_back(place.mask);
    }
    local_size_ = static_cast<int>(masks.size());
    cores_ = share_of_cores(masks, local_rank_);
}

Job::~Job() {
    try {
        // MPI_Finalize waits without a limit; after this no rank is far from it.
        world_->barrier();
    } catch (const std::exception& error) {
        fail(error.what());
    }
    MPI_Finalize();
}

// Often several ranks fail, at about the same moment or one after the other: the first one speaks, and of those
// whose messages cross, the lowest.
bool Job::speaks_of_failures() const {
    const auto lowest_failed = [&] {
        int rank = 0;
        while (rank < world_->size() && (rank == world_->rank() || !has_told(rank, fault_tag))) ++rank;
        return rank;
    };
    if (lowest_failed() < world_->size()) return false;
    tell_others(fault_tag);
    if (world_->size() == 1) return true;
    const auto end = std::chrono::steady_clock::now() + crossing_time;
    int lowest = world_->size();
    while (std::chrono::steady_clock::now() < end) {
        lowest = lowest_failed();
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return lowest > world_->rank();
}

void Job::fail(std::string_view what) const {
    bool speaks = true;
    try {
        speaks = speaks_of_failures();
    } catch (const std::exception&) {
        // MPI itself is what failed.
    }
    if (!speaks) std::this_thread::sleep_for(patience);  // the one that speaks ends this process
    abort_job(fmt::format("error: {}", one_line(what)));
}

void Job::end(int status) const {
    world_->barrier();
    std::fflush(stdout);
    if (world_->rank() != 0) std::this_thread::sleep_for(patience);  // rank 0 ends this process
    MPI_Abort(MPI_COMM_WORLD, status);
    std::_Exit(status);
}

}  // namespace llmc
