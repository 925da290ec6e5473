// allocations TRAIN_GPT-OPTION...
//
// Counts the allocations of training steps on every rank of the job. Prints "N of ours, M of libraries" for
// the steps after the first two, and the origin of each of ours. An allocation belongs to a library if the
// innermost frames of the call are in oneDNN, MPI or OpenMP. We cannot change their code.
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <string_view>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/launcher.h"
#include "llmc/data/data.h"
#include "llmc/data/samples.h"
#include "llmc/data/training_batches.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/options.h"
#include "llmc/train/trainer.h"

namespace {

constexpr int most_frames = 24;
using Stack = std::array<void*, most_frames>;

std::atomic<bool> counting{false};
std::atomic<int> ours{0}, of_libraries{0};
std::array<Stack, 16> stacks_of_ours{};
thread_local bool inside = false;  // recording an allocation allocates memory itself

// The file that contains the code at an address; empty if there is none.
std::string_view object_of(void* address) {
    Dl_info info{};
    return dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

bool is_of_library(std::string_view object) {
    constexpr std::array names = {"libdnnl", "libmpi",  "libopen-pal", "libopen-rte",
                                  "libgomp", "openmpi", "libpmix",     "libevent"};
    return std::ranges::any_of(names, [&](const char* name) { return object.find(name) != object.npos; });
}

// The allocation functions below, and the C++ library's functions on top of them, are attributed to their
// caller.
bool is_between(std::string_view object) {
    return object.find("libstdc++") != object.npos || object.find("libfmt") != object.npos ||
           object.find("libc.so") != object.npos || object.find("libgcc") != object.npos;
}

[[gnu::noinline, maybe_unused]] void note_allocation() {  // unused if the address sanitizer is enabled
    if (!counting || inside) return;
    inside = true;
    Stack stack{};
    const int frames = backtrace(stack.data(), most_frames);
    constexpr int own_frames = 2;  // this function and its caller
    bool library = false;
    for (int i = own_frames; i < frames; ++i) {
        const std::string_view object = object_of(stack[static_cast<std::size_t>(i)]);
        if (is_between(object)) continue;
        library = is_of_library(object);
        break;
    }
    if (library) {
        ++of_libraries;
    } else {
        const auto number = static_cast<std::size_t>(ours++);
        if (number < stacks_of_ours.size()) stacks_of_ours[number] = stack;
    }
    inside = false;
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__)
constexpr bool counts = false;  // the sanitizer has installed its own allocator
#else
constexpr bool counts = true;

// glibc's own functions, under the names it keeps for programs that replace them. (Its parameters have
// reserved names.)
// NOLINTBEGIN(readability-inconsistent-declaration-parameter-name)
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) {
    note_allocation();
    return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
    note_allocation();
    return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
    note_allocation();
    return __libc_realloc(memory, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
    note_allocation();
    return __libc_memalign(alignment, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
    note_allocation();
    return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    note_allocation();
    *memory = __libc_memalign(alignment, bytes);
    return *memory == nullptr ? ENOMEM : 0;
}
}
// NOLINTEND(readability-inconsistent-declaration-parameter-name)
#endif

namespace {

using namespace llmc;

void print_stacks() {
    for (const Stack& stack :
         std::span(stacks_of_ours).first(std::min<std::size_t>(ours, stacks_of_ours.size()))) {
        fmt::print("  allocated from:");
        for (void* frame : stack) {
            if (frame == nullptr) break;
            Dl_info info{};
            dladdr(frame, &info);
            fmt::print(" {}+{:#x}", info.dli_fname,
                       static_cast<std::byte*>(frame) - static_cast<std::byte*>(info.dli_fbase));
        }
        fmt::print("\n");
    }
}

void run(const Options& options, Job& job) {
    HostCommunicator& world = job.world();
    const std::unique_ptr<Device> device = make_cpu_device(job.cores());
    const RunPlan plan = plan_run({.model = options.make_model(),
                                   .dtype = options.compute_dtype(),
                                   .gradient_dtype = options.kept_gradient_dtype(),
                                   .mesh = options.mesh(world.size(), world.rank()),
                                   .recompute = options.recomputation(),
                                   .global_batch_tokens = *options.global_batch_tokens,
                                   .micro_batch_sequences = options.micro_batch_size.value_or(0)},
                                  device->sizes(), HostCommunicator::staging_bytes(world.size()));
    const Data data = open_data({.train_data = options.train_data,
                                 .val_data = options.val_data,
                                 .vocabulary = options.vocabulary(),
                                 .sequence_length = options.sequence_length()});
    const MeshGroups groups(world, plan.spec.mesh, plan.parts);
    Trainer trainer(options, plan, *device, world, groups);
    world.set_staging(trainer.arenas()[plan.communication]);
    const TrainingSamples samples(*data.training, plan.spec.model.sequence_length, options.seed);
    TrainingBatches batches(samples, plan.share(), plan.spec.model.sequence_length);

    Stack first{};
    backtrace(first.data(), most_frames);  // loads the libraries it needs
    // The first steps create the products' primitives, start threads and let vectors grow.
    for (int step = 0; step < 2; ++step) trainer.train_step(batches);
    counting = true;
    while (trainer.progress().step < options.steps) trainer.train_step(batches);
    counting = false;
    if (!counts) fmt::print("allocations are not counted in a build with address checks\n");
    fmt::print("rank {}: {} of ours, {} of libraries\n", world.rank(), ours.load(), of_libraries.load());
    print_stacks();
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    if (const auto status = launch_processes(argc, argv)) return *status;
    accept_stop_signals();  // ends this program, which does not handle it
    Job job;
    try {
        std::string text;
        if (auto options = parse_options(argc, argv, text)) {
            run(for_device(*options, DeviceKind::cpu), job);
        }
    } catch (const std::exception& fault) {
        job.fail(fault.what());
    }
}
