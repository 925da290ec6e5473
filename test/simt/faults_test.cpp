// Planted faults, each with its finder: the executor's own message, a wrong result in a random order, or a
// sanitizer. The same kernels without the fault always pass.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "dev/lab/memory.h"
#include "llmc/core/error.h"
#include "simt/executor.h"
#include "simt/planted_faults.cuh"

namespace {

using llmc::cuda::Chip;
using llmc::cuda::LaunchContext;

using Kernel = void (*)(float*, const float*);
enum class Finder { executor, result, address, undefined, thread };

struct Planted {
    const char* name;
    Kernel faulty, sound;
    Finder finder;
    const char* message;  // the executor's
};

#define PLANTED(kernel, finder, message)                                                                  \
    Planted {                                                                                             \
#kernel, planted_faults::kernel < true>, planted_faults::kernel < false>, Finder::finder, message \
    }

const Planted all_planted[] = {
    PLANTED(barrier_in_branch, executor, "returned without this barrier|returned before this barrier"),
    PLANTED(two_barriers, executor,
            "planted_faults.cuh:[0-9]+: threads of the block wait at another barrier, .*:[0-9]+"),
    PLANTED(two_sums_of_a_block, executor,
            "planted_faults.cuh:[0-9]+ > .*reduce.cuh:[0-9]+: threads of the block wait at another barrier, "
            ".*planted_faults.cuh:[0-9]+ > .*reduce.cuh:[0-9]+"),
    PLANTED(two_barriers_of_a_function, executor,
            "planted_faults.cuh:[0-9]+: threads of the block wait at another barrier, "),
    PLANTED(two_reductions_of_a_function, executor,
            "reduce.cuh:[0-9]+: threads of the block wait at another barrier, "),
    PLANTED(lambda_in_two_branches, executor,
            "planted_faults.cuh:[0-9]+: threads of the block wait at another barrier, "),
    PLANTED(two_maxima_of_a_warp, executor,
            "planted_faults.cuh:[0-9]+ > .*reduce.cuh:[0-9]+: lanes of the warp are in another collective, "
            ".*planted_faults.cuh:[0-9]+ > .*reduce.cuh:[0-9]+"),
    PLANTED(return_before_barrier, executor, "returned without this barrier|returned before this barrier"),
    PLANTED(mask_wider_than_branch, executor, "lanes? in the mask of this collective (have )?returned"),
    PLANTED(return_before_collective, executor, "lanes? in the mask of this collective (have )?returned"),
    PLANTED(two_collectives, executor, "lanes of the warp are in another collective, .*:[0-9]+"),
    PLANTED(shuffle_from_outside, executor, "a shuffle reads a lane that takes no part in it"),
    PLANTED(mask_without_own_lane, executor, "the mask of this collective misses its own lane"),
    PLANTED(block_waits_for_itself, executor,
            "the block waits for itself: 32 threads at .*planted_faults.cuh:[0-9]+; 32 threads at "),
    PLANTED(ldmatrix_of_global_memory, executor, "planted_faults.cuh:[0-9]+: not 16 bytes of shared memory"),
    PLANTED(asynchronous_copy_to_global_memory, executor,
            "planted_faults.cuh:[0-9]+: not 16 bytes of shared memory"),
    PLANTED(copy_never_waited_for, executor,
            "planted_faults.cuh:[0-9]+: the thread returned without waiting for this copy"),
    PLANTED(too_large_shared_variable, executor, "more than 49152 bytes of shared arrays"),
    PLANTED(all_shared_memory_for_variables, executor,
            "49664 bytes of shared memory .49152 of them the kernel's own arrays.; a block has 49152 unless"),
    PLANTED(misaligned_streaming_load, executor, "planted_faults.cuh:[0-9]+: a misaligned access"),
    PLANTED(divided_differently, executor, "divide the dynamic shared memory in different ways"),
    PLANTED(takes_more_than_launched, executor,
            "takes 768 bytes of dynamic shared memory; the launch gave 512"),
    PLANTED(missing_barrier, result, nullptr),
    PLANTED(missing_second_barrier, result, nullptr),
    PLANTED(missing_warp_barrier, result, nullptr),
    PLANTED(missing_copy_wait, result, nullptr),
    PLANTED(copy_of_the_same_values, result, nullptr),
    PLANTED(unwritten_shared_memory, result, nullptr),
    PLANTED(past_shared_variable, address, nullptr),
    PLANTED(past_dynamic_array, address, nullptr),
    PLANTED(past_global_array, address, nullptr),
    PLANTED(write_past_global_array, address, nullptr),
    PLANTED(copy_past_global_array, address, nullptr),
    PLANTED(misaligned_load, undefined, nullptr),
    PLANTED(missing_barrier, thread, nullptr),
    PLANTED(missing_second_barrier, thread, nullptr),
    PLANTED(missing_warp_barrier, thread, nullptr),
    PLANTED(shuffle_for_a_warp_barrier, thread, nullptr),
    PLANTED(copy_before_barrier, thread, nullptr),
    PLANTED(barrier_before_copy_wait, thread, nullptr),
    PLANTED(adds_of_a_block, thread, nullptr),
    PLANTED(adds_of_blocks, thread, nullptr),
};

void PrintTo(const Planted& planted, std::ostream* out) { *out << planted.name; }

LaunchContext on_chip(const Chip& chip) { return {.chip = chip}; }

// Whether the result is right.
bool run(Kernel kernel) {
    const bool of_blocks =
        kernel == planted_faults::adds_of_blocks<true> || kernel == planted_faults::adds_of_blocks<false>;
    lab::Draw draw(1);
    lab::Array<float> in(planted_faults::threads), out(planted_faults::threads + 1);
    draw.normal(in, 1);
    out[planted_faults::threads] = 0;
    launch(on_chip(llmc::cuda::sm_80), kernel, of_blocks ? 3 : 1, planted_faults::threads,
           planted_faults::shared_bytes, out.data(), in.data());
    for (int i = 0; i < planted_faults::threads; ++i) {
        if (out[i] != in[i] + in[planted_faults::threads - 1 - i]) return false;
    }
    return true;
}

int wrong_results(Kernel kernel, int seeds) {
    int wrong = 0;
    for (int seed = 1; seed <= seeds; ++seed) {
        simt::options().seed = static_cast<std::uint64_t>(seed);
        wrong += !run(kernel);
    }
    return wrong;
}

class Faults : public testing::TestWithParam<Planted> {
  protected:
    void SetUp() override {
        testing::FLAGS_gtest_death_test_style = "threadsafe";
        simt::options().report.clear();
    }
    void TearDown() override { simt::options() = before_; }

    simt::Options before_ = simt::options();
};

TEST_P(Faults, IsFound) {
    const Planted& planted = GetParam();
    switch (planted.finder) {
        case Finder::executor:
            EXPECT_DEATH(wrong_results(planted.faulty, 3),
                         std::string("simt: ") + planted.name + "<true>: .*(" + planted.message + ")");
            break;
        case Finder::result:
            EXPECT_GT(wrong_results(planted.faulty, 20), 0);
            break;
        case Finder::address:
            EXPECT_DEATH(run(planted.faulty), "AddressSanitizer");
            break;
        case Finder::undefined:
            EXPECT_DEATH(run(planted.faulty), "misaligned address");
            break;
        case Finder::thread:
            EXPECT_DEATH(run(planted.faulty), "ThreadSanitizer: data race");
            break;
    }
}

TEST_P(Faults, IsNotFoundWhereThereIsNone) { EXPECT_EQ(wrong_results(GetParam().sound, 5), 0); }

INSTANTIATE_TEST_SUITE_P(, Faults, testing::ValuesIn([] {
                             std::vector<Planted> chosen;
                             for (const Planted& planted : all_planted) {
#ifdef SIMT_THREAD
                                 const bool here = planted.finder == Finder::thread;
#elif defined SIMT_ADDRESS
                                 const bool here = planted.finder != Finder::thread;
#else
                                 const bool here =
                                     planted.finder == Finder::executor || planted.finder == Finder::result;
#endif
                                 if (here) chosen.push_back(planted);
                             }
                             return chosen;
                         }()),
                         [](const auto& planted) { return planted.param.name; });

#ifndef SIMT_THREAD  // which reports all of these as races
// The order of lanes, warps and blocks. A missing barrier may show in one order only.
TEST(Order, IsAnotherOneWithEachSeed) {
    const simt::Options before = simt::options();
    simt::options().report.clear();
    constexpr int all = 4 * planted_faults::threads;
    const auto is_right = [](std::uint64_t seed, int group, int distance) {
        simt::options().seed = seed;
        lab::Draw draw(1);
        lab::Array<float> in(all), out(all);
        draw.normal(in, 1);
        for (int i = 0; i < all; ++i) out[i] = 1e9f;
        launch(on_chip(llmc::cuda::sm_80), planted_faults::add_before, 4, planted_faults::threads, 0,
               out.data(), in.data(), group, distance);
        for (int i = 0; i < all; ++i) {
            if (out[i] != in[i] + (i % group < distance ? 0 : out[i - distance])) return false;
        }
        return true;
    };
    for (const auto& [group, distance] : {std::pair{32, 1}, {64, 32}, {all, 64}}) {
        EXPECT_TRUE(is_right(0, group, distance)) << distance;
        int wrong = 0;
        for (std::uint64_t seed = 1; seed <= 20; ++seed) wrong += !is_right(seed, group, distance);
        EXPECT_GT(wrong, 0) << distance;
    }
    simt::options() = before;
}
#endif

// ---- limits of a chip ----

void launch_empty(const Chip& chip, dim3 grid, dim3 block, std::size_t shared_bytes,
                  Kernel kernel = planted_faults::barrier_in_branch<false>) {
    lab::Array<float> in(planted_faults::threads), out(planted_faults::threads + 1);
    launch(on_chip(chip), kernel, grid, block, shared_bytes, out.data(), in.data());
}

class Limits : public testing::Test {
  protected:
    void TearDown() override { simt::options() = before_; }

    simt::Options before_ = simt::options();
};

TEST_F(Limits, OfThreadsAndBlocks) {
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, 1, 1025, 0), "launch refused: 1025 threads in a block");
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, 1, dim3(1, 1, 65), 0),
                 "launch refused: 65 threads of a block in its third dimension; at most 64");
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, dim3(1, 65536), 32, 0), "a grid of .1, 65536, 1. blocks");
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, dim3(1, 1, 65536), 32, 0), "a grid of .1, 1, 65536. blocks");
    launch_empty(llmc::cuda::sm_80, 0, 32, 0);  // nothing to do, and nothing launched
}

TEST_F(Limits, OfSharedMemory) {
    simt::options().report.clear();
    launch_empty(llmc::cuda::sm_90, 1, 64, 227 << 10);
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, 1, 64, 227 << 10),
                 "launch refused: 232448 bytes of shared memory .*; a block has 166912 on sm_80");
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_86, 1, 64, 100 << 10), "a block has 101376 on sm_86");
}

// The kernel's own arrays count: as declared, and by the compiler's report before the kernel runs.
TEST_F(Limits, OfStaticAndDynamicSharedMemory) {
    simt::options().report.clear();
    const Kernel of_48_kb = planted_faults::all_shared_memory_for_variables<true>;
    launch_empty(llmc::cuda::sm_80, 1, 64, 115 << 10, of_48_kb);
    EXPECT_DEATH(
        launch_empty(llmc::cuda::sm_80, 1, 64, 116 << 10, of_48_kb),
        "167936 bytes of shared memory .49152 of them the kernel's own arrays.; a block has 166912 on");

    const Kernel kernel = planted_faults::barrier_in_branch<false>;
    auto& figures = simt::options().report[80][simt::symbol_of(reinterpret_cast<const void*>(kernel))];
    figures.static_shared_bytes = 20 << 10;
    launch_empty(llmc::cuda::sm_80, 1, 64, 28 << 10, kernel);
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, 1, 64, (28 << 10) + 1, kernel),
                 "launch refused: 49153 bytes .*; a block has 49152 unless more are asked for");
    launch_empty(llmc::cuda::sm_80, 1, 64, 143 << 10, kernel);  // launch() asks for them
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, 1, 64, 144 << 10, kernel), "a block has 166912 on sm_80");
}

TEST_F(Limits, OfTheCompilersReport) {
    const auto kernel = planted_faults::barrier_in_branch<false>;
    const std::string symbol = simt::symbol_of(reinterpret_cast<const void*>(kernel));
    ASSERT_NE(symbol, "");
    simt::options().report.clear();
    simt::options().report[80][symbol].registers = 1025;
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, 1, 64, 0),
                 "64 threads with 1025 registers each; a block has 65536");
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_86, 1, 64, 0), "64 threads with 1025 registers each");
    launch_empty(llmc::cuda::sm_90, 1, 64, 0);  // the report has nothing for this chip
    auto& figures = simt::options().report[80][symbol];
    figures = {.registers = 32, .most_threads = 64};
    launch_empty(llmc::cuda::sm_80, 1, 64, 0);
    EXPECT_DEATH(launch_empty(llmc::cuda::sm_80, 1, dim3(32, 3), 0),
                 "launch refused: 96 threads in a block; the kernel's __launch_bounds__ grants 64");
    simt::options().report[80].erase(symbol);
    simt::options().report[80]["another"].registers = 32;
    try {
        launch_empty(llmc::cuda::sm_80, 1, 64, 0);
        ADD_FAILURE() << "it was launched";
    } catch (const llmc::UserError& error) {
        EXPECT_TRUE(std::string(error.what())
                        .starts_with("the compiler's report on sm_80 lacks barrier_in_branch<false>;"))
            << error.what();
    }
}

}  // namespace
