// Runs CUDA kernels on the CPU, for tests. Every CUDA thread is a fiber. One operating-system thread runs the
// blocks of a grid one after another, and in a block any fiber that can go on. Fibers switch only when they
// wait, so the work between two barriers is not interrupted. ThreadSanitizer finds the faults that this
// hides.
//
// Faults end the process with one line that names the kernel, the line in it, block and thread:
// - a barrier or warp collective that some of its threads miss, or that threads reach at different lines or
//   through different calls,
// - more threads, registers or shared memory than the chip has, a misaligned 16-byte access,
// - a thread that returns without having waited for its copies.
// A test itself finds reads of memory that was never written, because they give NaN. Shared arrays begin as
// 0xff bytes, and the target of a cp.async holds 0xff until the copy is waited for. With a seed, warps, lanes
// and blocks take turns in a random order, so that a missing barrier shows as a wrong result. With
// -fsanitize=address, every shared array has red zones. With -fsanitize=thread, a missing barrier, or two
// blocks that write to one place, is reported as a data race.
//
// Some properties only a GPU can show. The layout of PTX fragments is taken from the manual (a conformance
// test compares it on a GPU). Memory fences order everything, there are no bank conflicts, and speed is not
// modelled.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "llmc/device/cuda/launch.h"
#include "simt/kernel_report.h"
#include "simt/site.h"

struct CUstream_st;  // the type that a cudaStream_t points to

namespace simt {

struct Options {
    // 0 runs blocks, warps and lanes in the order of their numbers.
    std::uint64_t seed = 0;
    // The compiler's report. A launch is refused if the kernel's registers do not fit, or if the kernel is
    // missing in the report. If the report does not have the chip, nothing is checked.
    KernelReport report;
    // Receives launches that must not run at once, and returns their result. `run` runs the kernel, in the
    // order of the stream. The CUDA runtime of the tests (runtime/) sets it if it is linked.
    std::function<cudaError_t(CUstream_st* stream, const void* kernel, std::function<void()> run)> queue;
    // Called when memory is touched that is not accessible. Returns whether it is now. The CUDA runtime sets it.
    std::function<bool(const void* address, bool writes)> make_accessible;
};
Options& options();

// Without a sanitizer, from now on a kernel is named that touches memory which is not there, for example through an
// index that was never written.
void catch_faults();
// The same for the calling thread alone, whose code may use the stack pointer for something else, as oneDNN's does.
void catch_faults_on_a_stack_of_their_own();

// The kernel's name in source code: "gelu_forward_kernel<float>".
std::string name_of_kernel(const void* kernel);

// The symbols of all kernels launched so far, and the number of blocks of the largest grid of each.
const std::map<std::string, std::size_t>& launched_kernels();

// Ends the process with the message and the thread's position.
[[noreturn]] void fail(const Site& site, const std::string& message);

// The running thread's place in its warp.
int lane();

// Threads wait for each other. Each gives an argument. When the last one has come, `together` is called once
// with the arguments of all, by lane (null: takes no part). Then all go on. `together` may touch the
// arguments only. The threads themselves read and write memory, so races are attributed to them.
using Lanes = void* const*;
using Together = void (*)(Lanes lanes, const Site& site);
void meet_warp(std::uint32_t mask, Together together, void* argument, const Site& site);
// Barriers: memory accesses of a thread before the barrier happen before those of other threads after it. No
// other collective orders memory, shuffles and votes included, as in CUDA.
void sync_warp(std::uint32_t mask, const Site& site);
void meet_block(const Site& site);

// Shared memory. A variable is identified by a key. All threads of a block have the same address for it.
void* static_shared(const void* key, std::size_t bytes, std::size_t alignment);
void* dynamic_shared(unsigned index, std::size_t offset, std::size_t bytes);
bool is_shared(const void* memory, std::size_t bytes);

// cp.async: a copy is done when its thread waits for it, not earlier. If a thread returns first, this is a
// fault: on a GPU the copy is still in flight, and no thread may read its result.
struct AsyncCopy {
    void* to;
    const void* from;           // null: writes zeros
    std::source_location line;  // the line of the kernel
};
void add_copy(const AsyncCopy& copy);
void commit_copies();
// Takes the oldest copy that is not in the newest `groups_left` groups. Returns false if there is none.
bool next_copy(int groups_left, AsyncCopy* copy);

struct DynamicShared {
    std::size_t bytes;
    // Limit of these bytes and the kernel's own arrays together: 48 KB, or the value given to
    // cudaFuncSetAttribute. (Not a bool: when g++ 12 fills variables with a pattern, it clears the padding
    // after a bool at a wrong place of a large closure.)
    std::size_t limit;
};

struct Grid {
    const void* kernel;
    dim3 blocks, threads;
    DynamicShared dynamic_shared;
    void (*run_thread)(void* call);
    void* call;
};
void run_grid(const llmc::cuda::Chip& chip, const Grid& grid);

}  // namespace simt
