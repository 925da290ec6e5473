// The scheduler of executor.h. It is compiled without sanitizers, because all fibers share its data on
// purpose. SIMT_ADDRESS or SIMT_THREAD tells which sanitizer the kernels are compiled with.
#include "simt/executor.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "llmc/device/cuda/launch.h"
#include "simt/cuda_on_cpu.h"
#include "simt/fiber.h"
#include "simt/launch_limits.h"

namespace simt {
namespace {

using llmc::cuda::Chip;
constexpr unsigned warp_threads = llmc::cuda::warp_threads;

enum class Waiting { no, for_warp, for_block, returned };

struct Thread {
    std::unique_ptr<Fiber> fiber;
    unsigned index = 0;  // in the block
    uint3 id{};
    Waiting waiting = Waiting::no;
    std::uint32_t mask = 0;  // this and the next three describe what it waits for
    Together together = nullptr;
    void* argument = nullptr;
    Site site;
    std::vector<AsyncCopy> copies;
    std::vector<std::size_t> copy_groups;           // copies up to the end of each committed group
    unsigned barriers = 0;                          // that it passed or waits for
    std::map<std::uint32_t, unsigned> collectives;  // the same, by mask

    unsigned warp() const { return index / warp_threads; }
    std::uint32_t lane_bit() const { return 1u << index % warp_threads; }
};

struct Collective {
    std::uint32_t mask = 0;
    std::uint32_t present = 0;
};

struct Warp {
    std::vector<Thread*> ready;
    std::vector<Collective> collectives;                        // at most one per mask
    std::uint32_t returned = 0;                                 // lanes, including those that the block does
                                                                // not have
    std::map<std::uint32_t, std::array<char*, 2>> sync_places;  // by mask
};

struct SharedArray {
    std::unique_ptr<void, decltype(&std::free)> memory;
    std::size_t bytes;
    std::size_t offset;  // its place in dynamic shared memory
    const void* key;     // identifies an array of static shared memory
};

// The running launch.
struct Run {
    const Chip* chip = nullptr;
    const Grid* grid = nullptr;
    std::string kernel_name;
    std::mt19937_64 random;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<unsigned> warp_order;
    std::vector<Thread*> at_barrier;
    unsigned returned = 0;
    unsigned turn = 0;  // a new number for each block
    std::uint64_t launches = 0;
    std::map<std::string, std::size_t> launched;  // the size of the largest grid, by symbol
    Thread* current = nullptr;
    std::vector<SharedArray> static_arrays, dynamic_arrays;
    // Arrays of blocks that ended. They are freed after the launch: free counts as a write, and blocks are
    // not ordered.
    std::vector<SharedArray> done;
    std::array<char*, 2> block_sync_places{};
    std::vector<std::unique_ptr<char>> all_sync_places;  // every block has new ones
};

Run run;

// For ThreadSanitizer, these places order the threads of a barrier. Each thread releases its past to a place,
// and all acquire from it. Two places alternate. With one place, a late thread would acquire what others
// released at the next barrier, and races between the two would be hidden.
std::array<char*, 2> make_sync_places() {
    std::array<char*, 2> places{};
    for (char*& place : places) place = run.all_sync_places.emplace_back(std::make_unique<char>()).get();
    return places;
}

char* warp_sync_place(Thread& thread, std::uint32_t mask) {
    if constexpr (!finds_races) return nullptr;
    const Unseen bookkeeping;
    const auto [places, fresh] = run.warps[thread.warp()].sync_places.try_emplace(mask);
    if (fresh) places->second = make_sync_places();
    return places->second[thread.collectives[mask]++ % 2];
}

char* block_sync_place(Thread& thread) { return run.block_sync_places[thread.barriers++ % 2]; }

struct Names {
    std::string symbol, of_kernel;
};

// Each is looked up once.
const Names& names_of(const void* kernel) {
    static std::map<const void*, Names> known;
    const auto [entry, fresh] = known.try_emplace(kernel);
    if (fresh) {
        const std::string symbol = symbol_of(kernel);
        entry->second = {symbol, symbol.empty() ? "(a local function)" : llmc::cuda::kernel_name(symbol)};
    }
    return entry->second;
}

// Reports a fault that has no line in the kernel.
[[noreturn]] void stop(const std::string& message) {
    std::string where;
    if (run.current) {
        const auto text = [](const uint3& i) {
            return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
        };
        where = "block " + text(blockIdx) + ", thread " + text(run.current->id) + ": ";
    }
    std::fprintf(stderr, "simt: %s: %s%s\n", run.kernel_name.c_str(), where.c_str(), message.c_str());
    std::abort();
}

std::size_t random_below(std::size_t n) { return options().seed == 0 ? 0 : run.random() % n; }

void make_ready(Thread& thread) {
    thread.waiting = Waiting::no;
    run.warps[thread.warp()].ready.push_back(&thread);
}

// Warps have a random order, and the first of them that can go on does. A missing barrier shows if one warp
// runs far ahead of another. Drawing single threads seldom causes that.
Thread* next_ready() {
    for (const unsigned w : run.warp_order) {
        auto& ready = run.warps[w].ready;
        if (ready.empty()) continue;
        const std::size_t i = random_below(ready.size());
        Thread* thread = ready[i];
        ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(i));
        return thread;
    }
    return nullptr;
}

void arrive_at_barrier(Thread& thread) {
    if (run.returned > 0) fail(thread.site, "a thread of the block returned before this barrier");
    if (!run.at_barrier.empty()) {
        const Site& other = run.at_barrier.front()->site;
        if (!same_place(other, thread.site)) {
            fail(thread.site, "threads of the block wait at another barrier, " + text(other));
        }
    }
    run.at_barrier.push_back(&thread);
    if (run.at_barrier.size() < run.threads.size()) return;
    for (Thread* waiting : run.at_barrier) make_ready(*waiting);
    run.at_barrier.clear();
}

void arrive_in_warp(Thread& thread) {
    Warp& warp = run.warps[thread.warp()];
    if (!(thread.mask & thread.lane_bit()))
        fail(thread.site, "the mask of this collective misses its own lane");
    if (thread.mask & warp.returned) fail(thread.site, "lanes in the mask of this collective have returned");
    auto collective = warp.collectives.begin();
    while (collective != warp.collectives.end() && collective->mask != thread.mask) ++collective;
    if (collective == warp.collectives.end())
        collective = warp.collectives.insert(collective, {thread.mask, 0});
    Thread* const first = &run.threads[thread.warp() * warp_threads];
    std::array<void*, warp_threads> arguments{};
    collective->present |= thread.lane_bit();
    const Thread& other = first[std::countr_zero(collective->present)];
    if (other.together != thread.together || !same_place(other.site, thread.site)) {
        fail(thread.site, "lanes of the warp are in another collective, " + text(other.site));
    }
    if (collective->present != collective->mask) return;
    for (unsigned i = 0; i < warp_threads; ++i) {
        if (collective->present >> i & 1) arguments[i] = first[i].argument;
    }
    warp.collectives.erase(collective);
    thread.together(arguments.data(), thread.site);
    for (unsigned i = 0; i < warp_threads; ++i) {
        if (thread.mask >> i & 1) make_ready(first[i]);
    }
}

void has_returned(Thread& thread) {
    thread.fiber.reset();
    if (!thread.copies.empty()) {
        fail({thread.copies.front().line}, "the thread returned without waiting for this copy");
    }
    ++run.returned;
    Warp& warp = run.warps[thread.warp()];
    warp.returned |= thread.lane_bit();
    if (!run.at_barrier.empty()) {
        fail(run.at_barrier.front()->site, "a thread of the block returned without this barrier");
    }
    for (const Collective& collective : warp.collectives) {
        if (!(collective.mask & thread.lane_bit())) continue;
        const Thread* first = &run.threads[thread.warp() * warp_threads];
        while (!(collective.present & first->lane_bit())) ++first;
        fail(first->site, "a lane in the mask of this collective returned");
    }
}

[[noreturn]] void report_deadlock() {
    std::map<std::string, int> waiting;
    for (const Thread& thread : run.threads) {
        if (thread.waiting != Waiting::returned) ++waiting[text(thread.site)];
    }
    std::string message = "the block waits for itself:";
    for (const auto& [where, count] : waiting)
        message += " " + std::to_string(count) + " threads at " + where + ";";
    message.pop_back();
    run.current = nullptr;
    stop(message);
}

void begin_block(unsigned index) {
    const dim3 grid = run.grid->blocks;
    const dim3 block = run.grid->threads;
    blockIdx = {index % grid.x, index / grid.x % grid.y, index / (grid.x * grid.y)};
    run.returned = 0;
    ++run.turn;
    for (auto* arrays : {&run.static_arrays, &run.dynamic_arrays}) {
        for (SharedArray& array : *arrays) run.done.push_back(std::move(array));
        arrays->clear();
    }
    run.block_sync_places = make_sync_places();
    std::iota(run.warp_order.begin(), run.warp_order.end(), 0u);
    if (options().seed != 0) std::shuffle(run.warp_order.begin(), run.warp_order.end(), run.random);
    for (Warp& warp : run.warps) {
        warp.returned = 0;
        warp.sync_places.clear();
    }
    const unsigned in_last_warp = static_cast<unsigned>(run.threads.size()) % warp_threads;
    if (in_last_warp != 0) run.warps.back().returned = ~0u << in_last_warp;
    for (unsigned i = 0; i < run.threads.size(); ++i) {
        Thread& thread = run.threads[i];
        thread.index = i;
        thread.id = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
        thread.copies.clear();
        thread.copy_groups.clear();
        thread.barriers = 0;
        thread.collectives.clear();
        thread.fiber = std::make_unique<Fiber>(run.turn, [&thread] {
            acquire_from(&run.turn);
            run.grid->run_thread(run.grid->call);
            thread.waiting = Waiting::returned;
            release_to(&run);
        });
        make_ready(thread);
    }
}

void run_block(unsigned index) {
    begin_block(index);
    while (Thread* thread = next_ready()) {
        run.current = thread;
        threadIdx = thread->id;
        thread->fiber->resume();
        switch (thread->waiting) {
            case Waiting::for_block:
                arrive_at_barrier(*thread);
                break;
            case Waiting::for_warp:
                arrive_in_warp(*thread);
                break;
            case Waiting::returned:
                has_returned(*thread);
                break;
            case Waiting::no:
                break;
        }
    }
    if (run.returned != run.threads.size()) report_deadlock();
    run.current = nullptr;
}

SharedArray make_array(std::size_t bytes, std::size_t alignment, std::size_t offset, const void* key) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, bytes) != 0) stop("no memory left");
    std::memset(memory, 0xff, bytes);  // NaN in every floating-point type
    return {{memory, &std::free}, bytes, offset, key};
}

std::size_t static_bytes() {
    std::size_t sum = 0;
    for (const SharedArray& array : run.static_arrays) sum += array.bytes;
    return sum;
}

}  // namespace

#if !defined(SIMT_ADDRESS) && !defined(SIMT_THREAD)
namespace {

// The faults of the host's own code occur again and end the process then.
void on_fault(int number, siginfo_t* fault, void* context) {
    // Bit 1 of a page fault's error code: it was a write.
    const bool writes = (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
    if (options().make_accessible && options().make_accessible(fault->si_addr, writes)) return;
    if (run.current) stop("touches memory that is not there");
    signal(number, SIG_DFL);
}

}  // namespace
#endif

void catch_faults() {
#if !defined(SIMT_ADDRESS) && !defined(SIMT_THREAD)
    struct sigaction action {};
    action.sa_flags = static_cast<int>(SA_SIGINFO | SA_NODEFER | SA_ONSTACK);
    action.sa_sigaction = on_fault;
    for (const int number : {SIGSEGV, SIGBUS}) sigaction(number, &action, nullptr);
#endif
}

void catch_faults_on_a_stack_of_their_own() {
#if !defined(SIMT_ADDRESS) && !defined(SIMT_THREAD)
    constexpr std::size_t bytes = 64 << 10;
    thread_local bool has_stack = false;
    if (has_stack) return;
    // Never freed, since work may run until the thread's very end.
    const stack_t stack{.ss_sp = new char[bytes], .ss_flags = 0, .ss_size = bytes};
    has_stack = sigaltstack(&stack, nullptr) == 0;
#endif
}

Options& options() {
    static Options instance;
    return instance;
}

std::string name_of_kernel(const void* kernel) { return names_of(kernel).of_kernel; }

const std::map<std::string, std::size_t>& launched_kernels() { return run.launched; }

void fail(const Site& site, const std::string& message) { stop(text(site) + ": " + message); }

int lane() { return static_cast<int>(run.current->index % warp_threads); }

void meet_warp(std::uint32_t mask, Together together, void* argument, const Site& site) {
    Thread& self = *run.current;
    self.waiting = Waiting::for_warp;
    self.mask = mask;
    self.together = together;
    self.argument = argument;
    self.site = site;
    self.fiber->suspend();
}

void sync_warp(std::uint32_t mask, const Site& site) {
    char* const sync_place = warp_sync_place(*run.current, mask);
    release_to(sync_place);
    meet_warp(
        mask, [](Lanes, const Site&) {}, nullptr, site);
    acquire_from(sync_place);
}

void meet_block(const Site& site) {
    Thread& self = *run.current;
    self.waiting = Waiting::for_block;
    self.site = site;
    char* const sync_place = block_sync_place(self);
    release_to(sync_place);
    self.fiber->suspend();
    acquire_from(sync_place);
}

void* static_shared(const void* key, std::size_t bytes, std::size_t alignment) {
    const Unseen bookkeeping;
    for (const SharedArray& array : run.static_arrays) {
        if (array.key == key) return array.memory.get();
    }
    run.static_arrays.push_back(make_array(bytes, alignment, 0, key));
    if (static_bytes() > Chip::default_shared_bytes) {
        stop("more than " + std::to_string(Chip::default_shared_bytes) + " bytes of shared arrays");
    }
    const std::string why = why_no_room_in_shared(*run.chip, run.grid->dynamic_shared, static_bytes());
    if (!why.empty()) stop(why);
    return run.static_arrays.back().memory.get();
}

void* dynamic_shared(unsigned index, std::size_t offset, std::size_t bytes) {
    const Unseen bookkeeping;
    if (offset + bytes > run.grid->dynamic_shared.bytes) {
        stop("takes " + std::to_string(offset + bytes) + " bytes of dynamic shared memory; the launch gave " +
             std::to_string(run.grid->dynamic_shared.bytes));
    }
    if (index == run.dynamic_arrays.size()) {
        run.dynamic_arrays.push_back(make_array(bytes, 128, offset, nullptr));
    }
    const SharedArray& array = run.dynamic_arrays.at(index);
    if (array.bytes != bytes || array.offset != offset) {
        stop("threads divide the dynamic shared memory in different ways");
    }
    return array.memory.get();
}

bool is_shared(const void* memory, std::size_t bytes) {
    const char* begin = static_cast<const char*>(memory);
    for (const auto* arrays : {&run.static_arrays, &run.dynamic_arrays}) {
        for (const SharedArray& array : *arrays) {
            const char* start = static_cast<const char*>(array.memory.get());
            if (begin >= start && begin + bytes <= start + array.bytes) return true;
        }
    }
    return false;
}

void add_copy(const AsyncCopy& copy) {
    const Unseen bookkeeping;
    run.current->copies.push_back(copy);
}

void commit_copies() {
    const Unseen bookkeeping;
    run.current->copy_groups.push_back(run.current->copies.size());
}

bool next_copy(int groups_left, AsyncCopy* copy) {
    const Unseen bookkeeping;
    auto& copies = run.current->copies;
    auto& groups = run.current->copy_groups;
    while (groups.size() > static_cast<std::size_t>(groups_left) && groups.front() == 0) {
        groups.erase(groups.begin());
    }
    if (groups.size() <= static_cast<std::size_t>(groups_left)) return false;
    *copy = copies.front();
    copies.erase(copies.begin());
    for (std::size_t& end : groups) --end;
    return true;
}

void run_grid(const Chip& chip, const Grid& grid) {
    run.chip = &chip;
    run.grid = &grid;
    const auto& [symbol, name] = names_of(grid.kernel);
    run.kernel_name = name;
    run.current = nullptr;
    if (const std::string why = why_refused(chip, grid, options().report, symbol); !why.empty())
        stop("launch refused: " + why);
    if (run.launches == 0) catch_faults();
    gridDim = grid.blocks;
    blockDim = grid.threads;
    run.random.seed(options().seed + run.launches++);  // another order each time
    run.threads.resize(grid.threads.x * grid.threads.y * grid.threads.z);
    run.warps.resize((run.threads.size() + warp_threads - 1) / warp_threads);
    run.warp_order.resize(run.warps.size());
    std::vector<unsigned> order(std::size_t{grid.blocks.x} * grid.blocks.y * grid.blocks.z);
    std::size_t& most_blocks = run.launched[symbol];
    most_blocks = std::max(most_blocks, order.size());
    std::iota(order.begin(), order.end(), 0u);
    if (options().seed != 0) std::shuffle(order.begin(), order.end(), run.random);
    release_to(&run.turn);  // makes visible what the host wrote before the launch
    {
        const Unseen bookkeeping;
        for (const unsigned block : order) run_block(block);
    }
    acquire_from(&run);
    run.static_arrays.clear();
    run.dynamic_arrays.clear();
    run.done.clear();
    run.all_sync_places.clear();
}

}  // namespace simt

// For launch() in programs without the CUDA runtime, where no launch returns an error.
__attribute__((weak)) const char* cudaGetErrorString(cudaError_t) { return "an error"; }
__attribute__((weak)) const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
__attribute__((weak)) cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
    return cudaSuccess;
}
