// NCCL on the CPU: calls that do not match, peers that do not come or are gone, communicators that do not
// block.
#include <chrono>
#include <deque>
#include <thread>

#include "simt/runtime/nccl_ranks.h"

namespace runtime_test {
namespace {

using namespace std::chrono_literals;

using Use = std::function<void(int rank, ncclComm_t all, float* x, const Stream& stream)>;

// The ranks' output. Each rank begins with a communicator of all ranks and 16 numbers.
std::string output_of_ranks(int size, const Use& use, const Environment& environment = {}) {
    const ncclUniqueId id = new_id();
    std::string said;
    for (const Outcome& outcome : run_ranks(
             size,
             [&](int rank) {
                 const Communicator all(id, size, rank);
                 DeviceArray<float> x(16);
                 x.upload(std::vector(16, 1.0f));
                 const Stream stream;
                 use(rank, all, x.data, stream);
                 stream.synchronize();
                 return true;
             },
             environment)) {
        said += outcome.errors;
    }
    return said;
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

TEST(Nccl, calls_that_do_not_belong_together_are_reported) {
    const std::string counts =
        output_of_ranks(2, [](int rank, ncclComm_t all, float* x, const Stream& stream) {
            must(ncclAllReduce(x, x, rank == 0 ? 16 : 15, ncclFloat32, ncclSum, all, stream));
        });
    EXPECT_TRUE(
        contains(counts,
                 "simt: rank 0's ncclAllReduce of 16 float32 meets rank 1's ncclAllReduce of 15 float32") ||
        contains(counts,
                 "simt: rank 1's ncclAllReduce of 15 float32 meets rank 0's ncclAllReduce of 16 float32"))
        << counts;
    const std::string operations =
        output_of_ranks(2, [](int rank, ncclComm_t all, float* x, const Stream& stream) {
            must(ncclAllReduce(x, x, 16, ncclFloat32, rank == 0 ? ncclSum : ncclMax, all, stream));
        });
    EXPECT_TRUE(contains(operations, "with another operation")) << operations;
    const std::string orders =
        output_of_ranks(2, [](int rank, ncclComm_t all, float* x, const Stream& stream) {
            ncclComm_t other = nullptr;
            must(ncclCommSplit(all, 0, rank, &other, nullptr));
            const Stream side;
            for (const int turn : {rank, 1 - rank}) {
                turn == 0 ? must(ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, all, stream))
                          : must(ncclAllReduce(x + 8, x + 8, 8, ncclFloat32, ncclSum, other, side));
            }
            stream.synchronize();
        });
    EXPECT_TRUE(contains(orders, "that it issued in another order")) << orders;
    const std::string overlap = output_of_ranks(1, [](int, ncclComm_t all, float* x, const Stream& stream) {
        must(ncclAllReduce(x, x + 1, 8, ncclFloat32, ncclSum, all, stream));
    });
    EXPECT_TRUE(contains(overlap, "its buffers overlap, but not in the way of an in-place call")) << overlap;
    const std::string beyond = output_of_ranks(1, [](int, ncclComm_t all, float* x, const Stream& stream) {
        must(ncclAllReduce(x, x, 17, ncclFloat32, ncclSum, all, stream));
    });
    EXPECT_TRUE(contains(beyond, "a buffer is not, or not wholly, in allocated memory")) << beyond;
}

TEST(Nccl, a_peer_that_does_not_come_is_named) {
    const std::string said =
        output_of_ranks(3,
                        [](int rank, ncclComm_t all, float* x, const Stream& stream) {
                            if (rank == 1) std::this_thread::sleep_for(1200ms);
                            if (rank == 1) std::_Exit(0);
                            must(ncclAllReduce(x, x, 16, ncclFloat32, ncclSum, all, stream));
                        },
                        {{"SIMT_NCCL_SECONDS", "1"}});
    EXPECT_TRUE(contains(
        said, "simt: rank 0 of 3 still waits in ncclAllReduce of 16 float32 for rank 1 after 1 seconds"))
        << said;
}

// Of two ranks that stand still, what they say.
const Environment standing = {{"SIMT_NCCL_SECONDS", "1"}};

// A send ends when its peer receives. A small one may end before, in NCCL's buffers, which hides this.
TEST(Nccl, ranks_that_both_send_first_stand_still) {
    const auto exchange = [](bool grouped) {
        return output_of_ranks(
            2,
            [grouped](int rank, ncclComm_t all, float* x, const Stream& stream) {
                if (grouped) must(ncclGroupStart());
                must(ncclSend(x, 8, ncclFloat32, 1 - rank, all, stream));
                must(ncclRecv(x + 8, 8, ncclFloat32, 1 - rank, all, stream));
                if (grouped) must(ncclGroupEnd());
            },
            standing);
    };
    const std::string said = exchange(false);
    EXPECT_TRUE(contains(said,
                         "still waits in ncclSend of 8 float32 to rank 1 for rank 1 after 1 seconds: "
                         "stream 1 is at ncclSend of 8 float32 to rank 1, which waits for rank 1;"))
        << said;
    EXPECT_EQ(exchange(true), "");
}

// Rank 0 receives what rank 1 sends when it has received what rank 0 makes last.
std::string receive_before_sending(int most_blocks, bool loads_before,
                                   const Environment& environment = standing) {
    constexpr int pairs = 4;
    std::vector<ncclUniqueId> ids;
    for (int i = 0; i < pairs; ++i) ids.push_back(new_id());
    return output_of_ranks(
        2,
        [&](int rank, ncclComm_t all, float* x, const Stream& stream) {
            ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
            config.maxCTAs = most_blocks;
            if (loads_before) scale(stream, x, x, 1, 0);
            std::deque<Stream> streams;
            std::deque<Communicator> of_pairs;
            const Event made;
            if (rank == 1) must(ncclRecv(x, 1, ncclFloat32, 0, all, stream));
            stream.record(made);
            for (int i = 0; i < pairs; ++i) {
                ncclComm_t pair = nullptr;
                must(ncclCommInitRankConfig(&pair, 2, ids[static_cast<std::size_t>(i)], rank, &config));
                of_pairs.emplace_back(pair);
                streams.emplace_back();
                streams.back().wait(made);
                rank == 0 ? must(ncclRecv(x + 8 + i, 1, ncclFloat32, 1, pair, streams.back()))
                          : must(ncclSend(x + 8 + i, 1, ncclFloat32, 0, pair, streams.back()));
            }
            if (rank == 0) {
                scale(stream, x, x, 2, 0);
                must(ncclSend(x, 1, ncclFloat32, 1, all, stream));
            }
            must(cudaDeviceSynchronize());
        },
        environment);
}

// A receive holds its multiprocessors while it waits.
TEST(Nccl, receives_that_hold_the_multiprocessors_stand_still) {
    const std::string of_all = receive_before_sending(27, true), of_some = receive_before_sending(26, true);
    EXPECT_TRUE(contains(
        of_all,
        "stream 1 is at scale_kernel, which waits for a free multiprocessor, of which NCCL holds 108;"))
        << of_all;
    EXPECT_TRUE(contains(
        of_some, "stream 1 is at ncclSend of 1 float32 to rank 1, which waits for free multiprocessors;"))
        << of_some;
    EXPECT_EQ(receive_before_sending(4, true), "");
}

// A first launch may wait for all work of the GPU, and so for a receive that waits for what the launch makes.
TEST(Nccl, a_first_launch_beside_a_receive_stands_still) {
    const Environment odd = {{"SIMT_NCCL_SECONDS", "1"}, {"SIMT_SEED", "1"}};
    const std::string said = receive_before_sending(4, false, odd);
    EXPECT_TRUE(contains(said, "rank 0 of 2 still waits in ncclRecv of 1 float32 from rank 1")) << said;
    EXPECT_EQ(receive_before_sending(4, true, odd), "");
}

// A watching thread sees that the peer is gone and aborts, and the host's wait ends.
TEST(Nccl, a_peer_that_is_gone_is_an_error_that_a_watchdog_sees) {
    const ncclUniqueId id = new_id();
    const auto outcomes = run_ranks(2, [&](int rank) {
        ncclComm_t all = nullptr;
        must(ncclCommInitRank(&all, 2, id, rank));
        if (rank == 1) std::_Exit(0);
        DeviceArray<float> x(8);
        const Stream stream;
        must(ncclAllReduce(x.data, x.data, 8, ncclFloat32, ncclSum, all, stream));
        ncclResult_t state = ncclSuccess;
        std::thread watchdog([&] {
            while (state == ncclSuccess) {
                std::this_thread::sleep_for(1ms);
                must(ncclCommGetAsyncError(all, &state));
            }
            must(ncclCommAbort(all));
        });
        stream.synchronize();
        watchdog.join();
        return state == ncclRemoteError;
    });
    EXPECT_TRUE(outcomes[0].good()) << outcomes[0];
}

void wait_for(ncclComm_t communicator) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) must(ncclCommGetAsyncError(communicator, &state));
    must(state);
}

TEST(Nccl, a_communicator_that_does_not_block_is_in_progress_until_it_is_asked) {
    const ncclUniqueId id = new_id();
    for (const Outcome& outcome : run_ranks(2, [&](int rank) {
             ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
             config.blocking = 0;
             ncclComm_t all = nullptr, half = nullptr;
             bool good = ncclCommInitRankConfig(&all, 2, id, rank, &config) == ncclInProgress;
             wait_for(all);
             good = good && ncclCommSplit(all, 0, rank, &half, nullptr) == ncclInProgress && half == nullptr;
             wait_for(all);
             DeviceArray<float> x(8);
             x.upload(std::vector(8, 1.0f));
             const Stream stream;
             const auto add = [&](ncclComm_t communicator) {
                 return ncclAllReduce(x.data, x.data, 8, ncclFloat32, ncclSum, communicator, stream);
             };
             good = good && add(half) == ncclInProgress && add(half) == ncclInvalidArgument;
             wait_for(half);
             good = good && add(all) == ncclInProgress;
             wait_for(all);
             for (const auto communicator : {half, all}) {
                 good = good && ncclCommFinalize(communicator) == ncclInProgress;
                 wait_for(communicator);
                 must(ncclCommDestroy(communicator));
             }
             stream.synchronize();
             return good && x.download()[5] == 4;
         })) {
        EXPECT_TRUE(outcome.good()) << outcome;
    }
}

TEST(Nccl, ranks_that_share_a_gpu_are_refused_unless_they_say_so) {
    for (const bool say_so : {false, true}) {
        const ncclUniqueId id = new_id();
        for (const Outcome& outcome : run_ranks(
                 2,
                 [&](int rank) {
                     if (say_so) setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
                     ncclComm_t all = nullptr;
                     const ncclResult_t result = ncclCommInitRank(&all, 2, id, rank);
                     const bool named = contains(ncclGetLastError(nullptr), "Duplicate GPU detected");
                     return say_so ? result == ncclSuccess && !named : result == ncclInvalidUsage && named;
                 },
                 {{"SIMT_GPUS", "1"}})) {
            EXPECT_TRUE(outcome.good()) << say_so << outcome;
        }
    }
}

}  // namespace
}  // namespace runtime_test
