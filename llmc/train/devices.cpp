#include "llmc/train/devices.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "llmc/comm/nccl/nccl_communicator.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/device/cuda/gpus.h"
#include "llmc/train/algorithms.h"

namespace llmc {

namespace {

// A rank's report to the others: whether it found a GPU, and that GPU's UUID.
struct Found {
    std::int32_t gpu = 0;
    std::array<std::int32_t, 4> uuid{};
};

// Ranks may see different devices. If some have a GPU, a rank without one must not fall back to its CPU.
void require_all(const std::vector<Found>& all, const std::string& why_none) {
    const auto without = std::ranges::find(all, 0, &Found::gpu);
    if (without == all.end()) return;
    user_error("process {} has no GPU, but others have one{}; give each process a GPU, or use --device cpu",
               without - all.begin(), why_none.empty() ? "" : ": " + why_none);
}

// The number of processes on this rank's GPU.
int sharing(const std::vector<Found>& all, int rank) {
    return static_cast<int>(std::ranges::count(all, all[static_cast<std::size_t>(rank)].uuid, &Found::uuid));
}

void refuse_sharing(const std::vector<Found>& all, const std::string& name) {
    for (auto one = all.begin(); one != all.end(); ++one) {
        const auto other =
            std::find_if(one + 1, all.end(), [&](const Found& f) { return f.uuid == one->uuid; });
        if (other == all.end()) continue;
        user_error(
            "processes {} and {} would share one GPU ({}), which is slower than one process; start one "
            "process per GPU, or use --share-gpu for a test",
            one - all.begin(), other - all.begin(), name);
    }
}

// All ranks use the algorithms that rank 0 chooses. Such a choice is valid for one kind of GPU and one
// version of the libraries, which Device::choices names.
void require_same_kind(const std::string& own, Communicator& world) {
    using Text = std::array<char, 256>;
    Text own_text{};
    own.copy(own_text.data(), sizeof(Text) - 1);
    const std::vector<Text> all = values_of_ranks(world, own_text);
    const auto other = std::ranges::find_if(all, [&](const Text& text) { return text != all.front(); });
    if (other == all.end()) return;
    user_error(
        "process {} has another kind of GPU or other libraries than process 0 ({}; {}), so their results "
        "would differ; start all processes on equal GPUs, or use --device cpu",
        other - all.begin(), other->data(), all.front().data());
}

// NCCL connects ranks, and allocates memory for that, when a collective first needs the connection. This
// depends on the kind of collective and its size. So each collective is called here with few and with many
// elements.
void connect(Communicator& ranks, Device& device) {
    constexpr std::int64_t much = 8 << 20;  // bytes
    const std::int64_t size = ranks.size();
    const auto release = [&](std::byte* memory) { device.release(memory); };
    const std::unique_ptr<std::byte, decltype(release)> memory(device.allocate(much, "of NCCL connections"),
                                                               release);
    for (const std::int64_t elements : {size, much / 4 / size * size}) {
        const Tensor x{memory.get(), DType::fp32, {elements}};
        const Tensor own = x.slice(ranks.rank() * elements / size, elements / size);
        ranks.all_reduce(x);
        ranks.reduce_scatter(own, x);
        ranks.all_gather(x, own);
        ranks.broadcast(x, 0);
        if (ranks.size() != 2) continue;
        ranks.group_begin();
        ranks.send(own, 1 - ranks.rank());
        ranks.recv(x.slice((1 - ranks.rank()) * elements / size, elements / size), 1 - ranks.rank());
        ranks.group_end();
    }
    device.synchronize();
}

}  // namespace

Place open_device(const Options& options, Job& job) {
    Place place;
    Communicator& world = job.world();
    Gpus gpus;
    if (options.device != "cpu") gpus = find_gpus();
    const int own = gpus.all.empty() ? 0 : job.local_rank() % static_cast<int>(gpus.all.size());
    Found found;
    if (!gpus.all.empty()) {
        found.gpu = 1;
        std::memcpy(found.uuid.data(), gpus.all[static_cast<std::size_t>(own)].uuid.data(),
                    sizeof found.uuid);
    }
    // These OpenMP threads initialize weights and lay them out for files. The device's own threads are set
    // below.
    if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(job.cores());
    const std::vector<Found> all = values_of_ranks(world, found);
    const bool any = std::ranges::count(all, 1, &Found::gpu) > 0;
    if (options.device == "cuda" && !any)
        user_error("--device cuda: no GPU: {}; try --device cpu", gpus.why_none);
    place.run = configured(options, any ? DeviceKind::cuda : DeviceKind::cpu,
                           {.processes = world.size(), .on_machine = job.local_size(), .rank = world.rank()});
    // The CPU device uses OMP_NUM_THREADS threads if that is set, else this process's share of the machine's cores.
    const int threads = std::getenv("OMP_NUM_THREADS") ? 0 : job.cores();
    if (!any) {
        place.device = make_cpu_device(threads);
        place.sharing = job.local_size();
        place.note = gpus.why_none;
        return place;
    }
    require_all(all, gpus.why_none);
    place.sharing = sharing(all, world.rank());
    if (!options.share_gpu) refuse_sharing(all, gpus.all[static_cast<std::size_t>(own)].name);
    place.device = make_cuda_device(
        {.gpu = own,
         .attention = place.run.options.attention == "cudnn" ? AttentionKind::cudnn : AttentionKind::flash,
         .tf32 = place.run.options.tf32,
         .host_threads = threads,
         .sync = options.cuda_sync});
    require_same_kind(kind_of_choices(*place.device), world);
    return place;
}

std::size_t staging_bytes(const Communicator& world, Device& device) {
    return device.streams() ? 0 : HostCommunicator::staging_bytes(world.size());
}

MeshRanks open_mesh(const Options& options, HostCommunicator& world, Device& device, const RunSpec& spec) {
    const std::vector<StagePart> parts = parts_of_pipeline(spec);
    const bool wraps = options.chunks_of_stage() > 1;
    if (!device.streams() || world.size() == 1) return {nullptr, MeshGroups(world, spec.mesh, parts, wraps)};
    const std::size_t before = device.memory_taken();
    auto nccl = make_nccl_communicator(world, *device.streams(), options.share_gpu);
    MeshGroups groups(*nccl, spec.mesh, parts, wraps);
    connect(groups.data(), device);
    groups.for_each([&](Communicator& group) {
        if (&group != &groups.data()) connect(group, device);
    });
    const std::size_t after = device.memory_taken();
    return {std::move(nccl), std::move(groups), after - std::min(before, after)};
}

MachineMemory free_memory(const Place& place, Communicator& world, int processes_here) {
    struct Free {
        double bytes, processes, host_bytes, host_processes;
    };
    const std::vector<Free> all = values_of_ranks(
        world, Free{static_cast<double>(place.device->available_memory()), static_cast<double>(place.sharing),
                    static_cast<double>(place.device->host().available_memory()),
                    static_cast<double>(processes_here)});
    const Free least =
        *std::ranges::min_element(all, {}, [](const Free& f) { return f.bytes / f.processes; });
    const Free host =
        *std::ranges::min_element(all, {}, [](const Free& f) { return f.host_bytes / f.host_processes; });
    return {.bytes = static_cast<std::size_t>(least.bytes),
            .processes = static_cast<int>(least.processes),
            .host_bytes = static_cast<std::size_t>(host.host_bytes),
            .host_processes = static_cast<int>(host.host_processes),
            .name = place.device->streams() ? "the GPU" : "this machine",
            .more_processes_bring_more = place.device->streams() != nullptr && least.processes == 1,
            .is_of_cpu = place.device->streams() == nullptr};
}

}  // namespace llmc
