// Runs CUDA kernels on the CPU, for tests. Every CUDA thread is a fiber; one operating-system thread runs the
// blocks of a grid one after the other, and in a block whichever fiber can go on. Fibers switch only where they
// wait, so what one does between two barriers is done at once: what that hides, ThreadSanitizer finds.
//
// Faults end the process with one line that names the kernel, the line in it, block and thread:
// - a barrier or warp collective that some of its threads miss, or where they meet others' at another line or come
//   through another call,
// - more threads, registers or shared memory than the chip has, a misaligned 16-byte access,
// - what a test finds by itself since memory that was never written reads as NaN: shared arrays begin as 0xff
//   bytes, and the target of a cp.async holds 0xff until the copy is waited for,
// - a thread that returns without having waited for its copies.
// With a seed, warps and lanes take turns in a random order, and blocks too, so that a missing barrier shows as
// a wrong result. Compiled with -fsanitize=address every shared array has red zones; with -fsanitize=thread a
// missing barrier, or two blocks that write one place, is reported as a data race.
//
// It does not tell what only a GPU can: the layout of PTX fragments is taken from the manual (and compared on a
// GPU by a conformance test), memory fences order everything, there are no bank conflicts and there is no speed.
#pragma once

#include <cuda_bf16.h>
#include <vector_functions.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "llmc/device/cuda/chip.h"
#include "simt/kernel_report.h"
#include "simt/site.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace simt {

struct Options {
    // 0 runs blocks, warps and lanes in the order of their numbers.
    std::uint64_t seed = 0;
    // Of the compiler. A launch is refused where the kernel's registers do not fit, or where it is missing here.
    // Without figures for the chip nothing is known, and nothing checked.
    KernelReport report;
    // Where launches go, if they are not to run at once: `run` runs the kernel, in the order of the stream. The CUDA
    // runtime of the tests (runtime/) sets it where it is linked.
    std::function<void(CUstream_st* stream, const void* kernel, std::function<void()> run)> queue;
};
Options& options();

// What a person calls a kernel: "gelu_forward_kernel<float>".
std::string name_of_kernel(const void* kernel);

// The symbols of all kernels launched until now, and how many blocks the largest grid of each had.
const std::map<std::string, std::size_t>& launched_kernels();

// Ends the process with the message, and says where the thread is.
[[noreturn]] void fail(const Site& site, const std::string& message);

// The running thread's place in its warp.
int lane();

// Threads meet and wait for each other. Each hands in an argument; when the last one has come, `together` is
// called once with the arguments of all, by lane (null: takes no part), and then all go on. It may touch the
// arguments only: memory is read and written by the threads themselves, so that races are theirs.
using Lanes = void* const*;
using Together = void (*)(Lanes lanes, const Site& site);
void meet_warp(std::uint32_t mask, Together together, void* argument, const Site& site);
// Barriers: what threads did to memory before them happens before what the others do after. No other meeting orders
// memory, shuffles and votes included, as CUDA says of them.
void sync_warp(std::uint32_t mask, const Site& site);
void meet_block(const Site& site);

// Shared memory. A variable is known by a key, its address the same in all threads of a block.
void* static_shared(const void* key, std::size_t bytes, std::size_t alignment);
void* dynamic_shared(unsigned index, std::size_t offset, std::size_t bytes);
bool is_shared(const void* memory, std::size_t bytes);

// cp.async: a copy is done when its thread waits for it, no earlier. A thread that returns first is a fault: the copy
// is still under way on a GPU, and nobody may read what it brings.
struct AsyncCopy {
    void* to;
    const void* from;           // null: zeros
    std::source_location line;  // the kernel's
};
void add_copy(const AsyncCopy& copy);
void commit_copies();
// Takes the oldest copy of all but the newest `groups_left` groups; false where there is none.
bool next_copy(int groups_left, AsyncCopy* copy);

struct DynamicShared {
    std::size_t bytes;
    // Of these and the kernel's own arrays: 48 KB, or what cudaFuncSetAttribute asked for. (Not a bool: where g++ 12 sets
    // variables to a pattern it clears the padding behind one in the wrong place of a large closure.)
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
