// NCCL on the CPU: the results of collectives, on 1 to 4 processes, each with its own random order.
#include <unistd.h>

#include <array>

#include "simt/runtime/nccl_ranks.h"

namespace runtime_test {
namespace {

using llmc::cuda::bf16;

testing::AssertionResult is_right_on_ranks(int size, const std::function<bool(int rank)>& body) {
    for (const char* seed : {"0", "1", "2", "3"}) {
        int rank = 0;
        for (const Outcome& outcome : run_ranks(size, body, {{"SIMT_SEED", seed}})) {
            if (!outcome.good())
                return testing::AssertionFailure() << "seed " << seed << ", rank " << rank << ": " << outcome;
            ++rank;
        }
    }
    return testing::AssertionSuccess();
}

// Whole numbers, so that sums are exact in any order.
float contribution(int rank, int i) { return static_cast<float>((rank + 1) * (i % 7 + 1)); }

template <class T>
std::vector<T> contributions(int rank, int n) {
    std::vector<T> values;
    for (int i = 0; i < n; ++i) values.push_back(T(contribution(rank, i)));
    return values;
}

template <class T>
constexpr ncclDataType_t type_of = std::is_same_v<T, float> ? ncclFloat32 : ncclBfloat16;

float number(float x) { return x; }
float number(bf16 x) { return __bfloat162float(x); }

template <class T>
bool is(const std::vector<T>& values, const std::function<float(int)>& expected) {
    for (int i = 0; i < static_cast<int>(values.size()); ++i) {
        if (number(values[static_cast<std::size_t>(i)]) == expected(i)) continue;
        std::fprintf(stderr, "element %d is %g instead of %g\n", i,
                     number(values[static_cast<std::size_t>(i)]), expected(i));
        return false;
    }
    return true;
}

template <class T>
bool all_collectives(const ncclUniqueId& id, int size, int rank, int n) {
    const Communicator all(id, size, rank);
    const Stream stream;
    const auto count = static_cast<std::size_t>(n);
    const auto whole = count * static_cast<std::size_t>(size);
    const auto sum = [&](int i) {
        float s = 0;
        for (int r = 0; r < size; ++r) s += contribution(r, i);
        return s;
    };
    DeviceArray<T> reduced(count), to_scatter(whole), scattered(count), own(count), gathered(whole),
        copied(count);
    reduced.upload(contributions<T>(rank, n));
    to_scatter.upload(contributions<T>(rank, n * size));
    own.upload(contributions<T>(rank, n));
    copied.upload(contributions<T>(rank, n));
    must(ncclAllReduce(reduced.data, reduced.data, count, type_of<T>, ncclSum, all, stream));
    must(ncclReduceScatter(to_scatter.data, scattered.data, count, type_of<T>, ncclSum, all, stream));
    must(ncclAllGather(own.data, gathered.data, count, type_of<T>, all, stream));
    must(ncclBroadcast(copied.data, copied.data, count, type_of<T>, size - 1, all, stream));
    must(ncclAllReduce(own.data, own.data, count, type_of<T>, ncclMax, all, stream));
    stream.synchronize();
    bool good = is<T>(reduced.download(), sum) &&
                is<T>(scattered.download(), [&](int i) { return sum(rank * n + i); }) &&
                is<T>(gathered.download(), [&](int i) { return contribution(i / n, i % n); }) &&
                is<T>(copied.download(), [&](int i) { return contribution(size - 1, i); }) &&
                is<T>(own.download(), [&](int i) { return contribution(size - 1, i); });
    // Halves and quarters are exact.
    own.upload(contributions<T>(rank, n));
    must(ncclAllReduce(own.data, own.data, count, type_of<T>, ncclAvg, all, stream));
    stream.synchronize();
    good = good &&
           (size == 3 || is<T>(own.download(), [&](int i) { return sum(i) / static_cast<float>(size); }));
    // In place, and too large for the buffer of any socket.
    T* const part = to_scatter.data + rank * n;
    must(ncclReduceScatter(to_scatter.data, part, count, type_of<T>, ncclSum, all, stream));
    must(ncclAllGather(part, to_scatter.data, count, type_of<T>, all, stream));
    stream.synchronize();
    return good && is<T>(to_scatter.download(), sum);
}

TEST(Nccl, collectives_on_1_to_4_ranks) {
    for (const int size : {1, 2, 3, 4}) {
        for (const int n : {1, 13, 300'000}) {
            const ncclUniqueId ids[] = {new_id(), new_id(), new_id(), new_id(),
                                        new_id(), new_id(), new_id(), new_id()};
            EXPECT_TRUE(is_right_on_ranks(size,
                                          [&](int rank) {
                                              const char* seed = std::getenv("SIMT_SEED");
                                              const std::size_t run = static_cast<std::size_t>(seed[0] - '0');
                                              return all_collectives<float>(ids[2 * run], size, rank, n) &&
                                                     (n > 1000 ||
                                                      all_collectives<bf16>(ids[2 * run + 1], size, rank, n));
                                          }))
                << size << " ranks, " << n;
        }
    }
}

// Part p begins with rank p + 1: 1 + 1 + 256 gives 258. In another order, 256 + 1 rounds to 256 each time.
TEST(Nccl, sums_of_bf16_round_at_every_step_around_the_ring) {
    const ncclUniqueId id = new_id();
    for (const Outcome& outcome : run_ranks(3, [&](int rank) {
             const Communicator all(id, 3, rank);
             DeviceArray<bf16> x(3);
             x.upload(std::vector<bf16>(3, bf16(rank == 0 ? 256.0f : 1.0f)));
             must(ncclAllReduce(x.data, x.data, 3, ncclBfloat16, ncclSum, all, nullptr));
             const std::array expected = {258.0f, 256.0f, 256.0f};
             return is<bf16>(x.download(), [&](int i) { return expected.at(static_cast<std::size_t>(i)); });
         })) {
        EXPECT_TRUE(outcome.good()) << outcome;
    }
}

TEST(Nccl, sends_and_receives_of_a_group_go_on_together) {
    std::vector<ncclUniqueId> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(new_id());
    EXPECT_TRUE(is_right_on_ranks(3, [&](int rank) {
        const Communicator all(ids[static_cast<std::size_t>(std::getenv("SIMT_SEED")[0] - '0')], 3, rank);
        constexpr int n = 300'000;
        DeviceArray<float> own(n), from_left(n);
        own.upload(contributions<float>(rank, n));
        const Stream stream;
        must(ncclGroupStart());
        must(ncclSend(own.data, n, ncclFloat32, (rank + 1) % 3, all, stream));
        must(ncclRecv(from_left.data, n, ncclFloat32, (rank + 2) % 3, all, stream));
        must(ncclGroupEnd());
        stream.synchronize();
        return is<float>(from_left.download(), [&](int i) { return contribution((rank + 2) % 3, i); });
    }));
}

TEST(Nccl, a_communicator_takes_memory_until_it_is_destroyed) {
    const ncclUniqueId id = new_id();
    const auto body = [id](int rank) {
        const auto free_now = [] {
            std::size_t free_bytes = 0, total = 0;
            must(cudaMemGetInfo(&free_bytes, &total));
            return free_bytes;
        };
        const std::size_t before = free_now();
        {
            const Communicator all(id, 2, rank);
            if (free_now() != before - 5000) return false;
            const Communicator half = all.split(rank, 0);
            if (free_now() != before - 10000) return false;
        }
        return free_now() == before;
    };
    for (const Outcome& outcome : run_ranks(2, body, {{"SIMT_NCCL_BYTES", "5000"}}))
        EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(Nccl, communicators_are_split_and_used_side_by_side) {
    std::vector<ncclUniqueId> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(new_id());
    EXPECT_TRUE(is_right_on_ranks(4, [&](int rank) {
        const Communicator all(ids[static_cast<std::size_t>(std::getenv("SIMT_SEED")[0] - '0')], 4, rank);
        const Communicator pair = all.split(rank % 2, -rank);
        const Communicator first_three = all.split(rank < 3 ? 0 : NCCL_SPLIT_NOCOLOR, rank);
        int size = 0, place = 0;
        must(ncclCommCount(pair, &size));
        must(ncclCommUserRank(pair, &place));
        if (size != 2 || place != (rank < 2 ? 1 : 0) || (rank == 3) != (first_three == nullptr)) return false;
        const Stream one, other;
        const Event produced, added;
        DeviceArray<float> x(8), y(8);
        x.upload(std::vector(8, 1.0f));
        y.upload(std::vector(8, 1.0f));
        for (int round = 0; round < 5; ++round) {
            must(ncclAllReduce(x.data, x.data, 8, ncclFloat32, ncclSum, all, one));
            must(ncclAllReduce(y.data, y.data, 8, ncclFloat32, ncclSum, pair, other));
            if (rank < 3) must(ncclBroadcast(y.data, y.data, 8, ncclFloat32, 0, first_three, other));
        }
        one.synchronize();
        other.synchronize();
        return x.download()[3] == 1024 && y.download()[7] == (rank == 3 ? y.download()[0] : y.download()[1]);
    }));
}

TEST(Nccl, calls_of_a_communicator_keep_their_order_whatever_their_streams) {
    std::vector<ncclUniqueId> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(new_id());
    EXPECT_TRUE(is_right_on_ranks(2, [&](int rank) {
        const Communicator all(ids[static_cast<std::size_t>(std::getenv("SIMT_SEED")[0] - '0')], 2, rank);
        const Stream one, other;
        DeviceArray<float> x(8), y(8);
        x.upload(std::vector(8, 1.0f));
        y.upload(std::vector(8, 2.0f));
        for (int i = 0; i < 5; ++i) {
            must(ncclAllReduce(x.data, x.data, 8, ncclFloat32, ncclSum, all, one));
            must(ncclAllReduce(y.data, y.data, 8, ncclFloat32, ncclSum, all, other));
        }
        must(cudaDeviceSynchronize());
        return x.download()[0] == 32 && y.download()[0] == 64;
    }));
}

bool gradient_step(const ncclUniqueId& id, int rank, bool waits) {
    const Communicator all(id, 2, rank);
    DeviceArray<float> x(8);
    x.upload(std::vector(8, 1.0f));
    const Stream compute, communication;
    const Event produced, added;
    for (int i = 0; i < 10; ++i) scale(compute, x.data, x.data, 1, 1);
    compute.record(produced);
    if (waits) communication.wait(produced);
    must(ncclAllReduce(x.data, x.data, 8, ncclFloat32, ncclSum, all, communication));
    communication.record(added);
    compute.wait(added);
    scale(compute, x.data, x.data, 0.5f, 0);
    compute.synchronize();
    return is<float>(x.download(), [](int) { return 11.0f; });
}

TEST(Nccl, a_collective_that_does_not_wait_for_its_data_shows) {
    bool went_wrong = false;
    for (int seed = 0; seed < 10; ++seed) {
        const ncclUniqueId right = new_id(), wrong_one = new_id();
        const Environment environment{{"SIMT_SEED", std::to_string(seed)}};
        for (const auto& outcome : run_ranks(
                 2, [&](int rank) { return gradient_step(right, rank, true); }, environment)) {
            EXPECT_TRUE(outcome.good()) << outcome;
        }
        for (const auto& outcome : run_ranks(
                 2, [&](int rank) { return gradient_step(wrong_one, rank, false); }, environment)) {
            went_wrong = went_wrong || outcome.status == wrong;
        }
    }
    EXPECT_TRUE(went_wrong);
}

// As on a GPU, while the host waits for something else.
TEST(Nccl, goes_on_while_the_host_is_elsewhere) {
    const ncclUniqueId id = new_id();
    std::array<int, 2> ends{};
    ASSERT_EQ(pipe(ends.data()), 0);
    for (const Outcome& outcome : run_ranks(2, [&](int rank) {
             const Communicator all(id, 2, rank);
             DeviceArray<float> x(8);
             x.upload(std::vector(8, 1.0f));
             const Stream stream;
             scale(stream, x.data, x.data, 1, 1);
             must(ncclAllReduce(x.data, x.data, 8, ncclFloat32, ncclSum, all, stream));
             char token = 1;
             if (rank == 0 && read(ends[0], &token, 1) != 1)
                 return false;  // the other rank writes it at its end
             stream.synchronize();
             if (rank == 1 && write(ends[1], &token, 1) != 1) return false;
             return x.download()[0] == 4;
         })) {
        EXPECT_TRUE(outcome.good()) << outcome;
    }
}

}  // namespace
}  // namespace runtime_test
