// Tests the host communicator's guarantees. The bits of a sum follow the order of the tree for every size,
// chunk and place. Bytes follow the formulas. Groups, splits and errors are tested too.
// test/python/test_communicator.py tests faults (stuck and killed ranks) and compares Open MPI's own byte
// count.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "llmc/comm/exchange.h"
#include "llmc/comm/host_communicator.h"
#include "llmc/core/random.h"
#include "mpi_test.h"

namespace llmc {
namespace {

using test::world;

template <class T>
Tensor tensor_of(std::vector<T>& values) {
    return {reinterpret_cast<std::byte*>(values.data()),
            dtype_of<T>(),
            {static_cast<std::int64_t>(values.size())}};
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// A rank's contribution: numbers of both signs, with magnitudes from 2^-8 to 2^8. The order of a sum
// therefore shows in its bits.
template <class T>
std::vector<T> contribution(int rank, std::size_t count) {
    const RandomStream random(static_cast<std::uint64_t>(rank), "contribution");
    std::vector<T> values(count);
    for (std::size_t i = 0; i < count; ++i) {
        const double value =
            std::ldexp(random.uniform(2 * i) - 0.5, static_cast<int>(random.below(2 * i + 1, 17)) - 8);
        if constexpr (std::is_same_v<T, bfloat16>) {
            values[i] = to_bfloat16(static_cast<float>(value));
        } else {
            values[i] = static_cast<T>(std::is_same_v<T, std::int32_t> ? value * 1e6 : value);
        }
    }
    return values;
}

// The sum of two contributions, computed in fp32 (fp64 for doubles) and rounded to their type.
template <class T>
T sum_of(T a, T b) {
    if constexpr (std::is_same_v<T, double>) {
        return a + b;
    } else {
        return from_float<T>(to_float(a) + to_float(b));
    }
}

// Adds neighbouring pairs level by level, one element at a time. This follows the definition, not the
// implementation.
template <class T>
T add_as_tree(std::vector<T> level) {
    while (level.size() > 1) {
        std::vector<T> next;
        for (std::size_t i = 0; i + 1 < level.size(); i += 2) next.push_back(sum_of(level[i], level[i + 1]));
        if (level.size() % 2 == 1) next.push_back(level.back());
        level = next;
    }
    return level[0];
}

template <class T>
std::vector<T> expected_sum(int ranks, std::size_t count) {
    std::vector<std::vector<T>> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(contribution<T>(rank, count));
    std::vector<T> sum(count);
    for (std::size_t i = 0; i < count; ++i) {
        std::vector<T> addends;
        for (const auto& values : all) addends.push_back(values[i]);
        sum[i] = add_as_tree(addends);
    }
    return sum;
}

template <class T>
std::vector<T> part_of(const std::vector<T>& whole, int index, std::size_t part) {
    const auto first = whole.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(index) * part);
    return {first, first + static_cast<std::ptrdiff_t>(part)};
}

std::size_t ranks() { return static_cast<std::size_t>(world().size()); }

// Gives the world staging memory of this many bytes, which lives until the program's end.
void use_staging(std::size_t bytes) {
    static std::vector<double> memory(HostCommunicator::staging_bytes(world().size()) / sizeof(double));
    world().set_staging(tensor_of(memory).flat(0, static_cast<std::int64_t>(bytes / sizeof(double))));
}

// Staging for which the pieces of a sum travel in chunks of this many bytes.
void use_chunks(std::size_t bytes) { use_staging(2 * (ranks() - 1) * bytes); }

std::uint64_t bytes_of(const Communicator& communicator, CallKind kind) {
    return communicator.traffic(kind).bytes;
}

template <class T>
class Sums : public testing::Test {};
using SumTypes = testing::Types<float, bfloat16, double>;
TYPED_TEST_SUITE(Sums, SumTypes);

template <class T>
class Copies : public testing::Test {};
using CopyTypes = testing::Types<float, bfloat16, double, std::int32_t>;
TYPED_TEST_SUITE(Copies, CopyTypes);

constexpr std::size_t part_sizes[] = {0, 1, 2, 3, 17, 512, 513, 5003};

TYPED_TEST(Sums, ReduceScatterIsTheTreeSumToTheBit) {
    for (const std::size_t chunk : {std::size_t{8}, std::size_t{1000}, std::size_t{512} << 10}) {
        use_chunks(chunk);
        for (const std::size_t part : part_sizes) {
            if (chunk == 8 && part > 600) continue;  // a message for every one or two elements takes too long
            const auto expected =
                part_of(expected_sum<TypeParam>(world().size(), part * ranks()), world().rank(), part);
            auto all = contribution<TypeParam>(world().rank(), part * ranks());
            const auto before = all;
            std::vector<TypeParam> own(part);
            world().reduce_scatter(tensor_of(own), tensor_of(all));
            EXPECT_TRUE(same_bits(own, expected)) << part << " elements in chunks of " << chunk << " bytes";
            EXPECT_TRUE(same_bits(all, before)) << "what is sent stays as it is";

            const auto in_place = static_cast<std::int64_t>(part);
            world().reduce_scatter(tensor_of(all).flat(world().rank() * in_place, in_place), tensor_of(all));
            EXPECT_TRUE(same_bits(part_of(all, world().rank(), part), expected)) << part << " in place";
        }
    }
}

TYPED_TEST(Sums, AllReduceIsTheTreeSumToTheBitForAnyCount) {
    for (const std::size_t chunk : {std::size_t{8}, std::size_t{1000}, std::size_t{512} << 10}) {
        use_chunks(chunk);
        for (std::size_t count : {0, 1, 2, 3, 5, 7, 8, 24, 100, 1025, 40009}) {
            if (chunk == 8 && count > 2000) continue;
            auto x = contribution<TypeParam>(world().rank(), count);
            world().all_reduce(tensor_of(x));
            EXPECT_TRUE(same_bits(x, expected_sum<TypeParam>(world().size(), count)))
                << count << " elements in chunks of " << chunk << " bytes";
        }
    }
}

TYPED_TEST(Sums, AllReduceIsReduceScatterThenAllGather) {
    use_chunks(4096);
    const std::size_t part = 1234;
    auto once = contribution<TypeParam>(world().rank(), part * ranks());
    auto twice = once;
    world().all_reduce(tensor_of(once));
    const Tensor own = tensor_of(twice).flat(world().rank() * static_cast<std::int64_t>(part), part);
    world().reduce_scatter(own, tensor_of(twice));
    world().all_gather(tensor_of(twice), own);
    EXPECT_TRUE(same_bits(once, twice));
}

// The sum inside aligned groups of 2^k ranks, then across the groups, equals the sum over all ranks, bit by
// bit.
TYPED_TEST(Sums, HybridSumsAreFlatSums) {
    use_chunks(4096);
    for (int group = 1; group <= world().size(); group *= 2) {
        if (world().size() % group != 0) continue;
        const auto inside = world().split(world().rank() / group, world().rank());
        const auto across = world().split(world().rank() % group, world().rank());
        ASSERT_EQ(inside->size(), group);
        ASSERT_EQ(across->size(), world().size() / group);
        const std::size_t part = 777;
        const auto count = part * static_cast<std::size_t>(group);
        auto x = contribution<TypeParam>(world().rank(), count);
        const Tensor own = tensor_of(x).flat(inside->rank() * static_cast<std::int64_t>(part), part);
        inside->reduce_scatter(own, tensor_of(x));
        across->all_reduce(own);
        inside->all_gather(tensor_of(x), own);
        EXPECT_TRUE(same_bits(x, expected_sum<TypeParam>(world().size(), count))) << "groups of " << group;
    }
}

TEST(Maximum, IsThatOfAllRanks) {
    use_chunks(64);
    for (const std::size_t count : {1, 2, 7, 40, 1001}) {
        auto x = contribution<std::int32_t>(world().rank(), count), expected = x;
        for (int rank = 0; rank < world().size(); ++rank) {
            const auto other = contribution<std::int32_t>(rank, count);
            for (std::size_t i = 0; i < count; ++i) expected[i] = std::max(expected[i], other[i]);
        }
        world().maximum(tensor_of(x));
        EXPECT_EQ(x, expected) << count;
    }
}

TYPED_TEST(Copies, AllGatherPutsThePartsInOrder) {
    for (const std::size_t part : part_sizes) {
        std::vector<TypeParam> expected;
        for (int rank = 0; rank < world().size(); ++rank) {
            const auto values = contribution<TypeParam>(rank, part);
            expected.insert(expected.end(), values.begin(), values.end());
        }
        auto own = contribution<TypeParam>(world().rank(), part);
        std::vector<TypeParam> all(part * ranks());
        world().all_gather(tensor_of(all), tensor_of(own));
        EXPECT_TRUE(same_bits(all, expected)) << part << " elements";

        std::vector<TypeParam> in_place(part * ranks());
        std::ranges::copy(own, in_place.begin() + world().rank() * static_cast<std::ptrdiff_t>(part));
        const auto count = static_cast<std::int64_t>(part);
        world().all_gather(tensor_of(in_place), tensor_of(in_place).flat(world().rank() * count, count));
        EXPECT_TRUE(same_bits(in_place, expected)) << part << " elements in place";
    }
}

TYPED_TEST(Copies, BroadcastGivesTheRootsValues) {
    for (int root = 0; root < world().size(); ++root) {
        for (const std::size_t count : part_sizes) {
            auto x = contribution<TypeParam>(world().rank(), count);
            world().broadcast(tensor_of(x), root);
            EXPECT_TRUE(same_bits(x, contribution<TypeParam>(root, count))) << "root " << root;
        }
    }
}

// All ranks send to the next and receive from the previous rank. A message of this size is not sent before
// its receiver takes it. Without the group, all ranks would wait for each other.
TYPED_TEST(Copies, GroupsPassARing) {
    if (world().size() == 1) GTEST_SKIP() << "needs a peer";
    const std::size_t count = 300001;
    const int next = (world().rank() + 1) % world().size();
    const int previous = (world().rank() + world().size() - 1) % world().size();
    auto mine = contribution<TypeParam>(world().rank(), count);
    std::vector<TypeParam> theirs(count);
    world().group_begin();
    world().send(tensor_of(mine), next);
    world().recv(tensor_of(theirs), previous);
    EXPECT_TRUE(same_bits(theirs, std::vector<TypeParam>(count))) << "nothing moves before group_end";
    world().group_end();
    EXPECT_TRUE(same_bits(theirs, contribution<TypeParam>(previous, count)));
}

TEST(PointToPoint, MessagesBetweenTwoRanksKeepTheirOrder) {
    if (world().size() == 1) GTEST_SKIP() << "needs a peer";
    std::vector<float> first = contribution<float>(0, 100000);
    std::vector<float> second = contribution<float>(1, 3);
    std::vector<float> none;
    if (world().rank() == 0) {
        world().send(tensor_of(first), world().size() - 1);
        world().send(tensor_of(none), world().size() - 1);
        world().group_begin();
        world().send(tensor_of(second), world().size() - 1);
        world().send(tensor_of(first), world().size() - 1);
        world().group_end();
    } else if (world().rank() == world().size() - 1) {
        std::vector<float> a(first.size()), b(second.size()), c(first.size());
        world().group_begin();
        world().recv(tensor_of(a), 0);
        world().recv(tensor_of(b), 0);
        world().group_end();
        world().recv(tensor_of(none), 0);
        world().recv(tensor_of(c), 0);
        EXPECT_TRUE(same_bits(a, first));
        EXPECT_TRUE(same_bits(b, second));
        EXPECT_TRUE(same_bits(c, first));
    }
}

// Two groups of the same ranks: a message sent over one is not received over the other.
TEST(Split, MessagesOfGroupsDoNotMix) {
    if (world().size() == 1) GTEST_SKIP() << "needs a peer";
    const auto a = world().split(0, world().rank());
    const auto b = a->split(0, a->rank());
    std::vector<std::int32_t> over_a{1}, over_b{2};
    if (world().rank() == 0) {
        a->send(tensor_of(over_a), 1);  // a few bytes can be sent before the receive starts
        b->send(tensor_of(over_b), 1);
    } else if (world().rank() == 1) {
        over_a = over_b = {0};
        b->recv(tensor_of(over_b), 0);
        a->recv(tensor_of(over_a), 0);
        EXPECT_EQ(over_a[0], 1);
        EXPECT_EQ(over_b[0], 2);
    }
    world().barrier();
}

TEST(Split, GroupsByColorInTheOrderOfKeys) {
    const int color = world().rank() % 2;
    const auto group = world().split(color, -world().rank());
    const int members = (world().size() + 1 - color) / 2;
    ASSERT_EQ(group->size(), members);
    // Ranks of the same parity in descending order: the highest comes first.
    std::vector<std::int32_t> world_ranks(static_cast<std::size_t>(members));
    std::vector<std::int32_t> own{world().rank()};
    group->all_gather(tensor_of(world_ranks), tensor_of(own));
    for (int i = 0; i < members; ++i)
        EXPECT_EQ(world_ranks[static_cast<std::size_t>(i)], color + 2 * (members - 1 - i));
    EXPECT_EQ(world_ranks[static_cast<std::size_t>(group->rank())], world().rank());
}

TEST(Split, EqualKeysKeepTheOrderOfRanks) {
    const auto group = world().split(7, 0);
    EXPECT_EQ(group->rank(), world().rank());
    EXPECT_EQ(group->size(), world().size());
}

TEST(AGroupOfOne, CopiesAndSendsNothing) {
    const auto alone = world().split(world().rank(), 0);
    ASSERT_EQ(alone->size(), 1);
    auto x = contribution<float>(0, 100);
    std::vector<float> sum(100), all(100);
    alone->reduce_scatter(tensor_of(sum), tensor_of(x));
    alone->all_gather(tensor_of(all), tensor_of(x));
    EXPECT_TRUE(same_bits(sum, x));
    EXPECT_TRUE(same_bits(all, x));
    alone->all_reduce(tensor_of(x));
    alone->broadcast(tensor_of(x), 0);
    alone->barrier();
    alone->group_begin();
    alone->group_end();
    EXPECT_TRUE(same_bits(x, sum));
    for (const CallKind kind : all_call_kinds) EXPECT_EQ(alone->traffic(kind).bytes, 0u);
    EXPECT_EQ(alone->traffic(CallKind::reduce_scatter).calls, 1u);
}

TYPED_TEST(Copies, BytesAreExactlyThoseOfTheFormulas) {
    use_chunks(1000);
    const auto group = world().split(0, world().rank());
    const std::uint64_t n = ranks();
    const std::uint64_t element = sizeof(TypeParam);
    const std::uint64_t part = 1717;
    std::vector<TypeParam> all(n * part), own(part);
    group->all_gather(tensor_of(all), tensor_of(own));
    EXPECT_EQ(bytes_of(*group, CallKind::all_gather), (n - 1) * part * element);
    group->broadcast(tensor_of(own), world().size() - 1);
    EXPECT_EQ(bytes_of(*group, CallKind::broadcast),
              world().rank() == world().size() - 1 ? (n - 1) * part * element : 0);
    if constexpr (!std::is_same_v<TypeParam, std::int32_t>) {
        group->reduce_scatter(tensor_of(own), tensor_of(all));
        EXPECT_EQ(bytes_of(*group, CallKind::reduce_scatter), (n - 1) * part * element);
        group->all_reduce(tensor_of(all));
        EXPECT_EQ(bytes_of(*group, CallKind::all_reduce), 2 * (n - 1) * part * element);
        std::vector<TypeParam> ragged(n * 5 + n - 1);
        group->all_reduce(tensor_of(ragged));
        EXPECT_EQ(bytes_of(*group, CallKind::all_reduce), (n - 1) * (2 * part + 2 * 5 + (n - 1)) * element);
        EXPECT_EQ(group->traffic(CallKind::all_reduce).calls, 2u);
    }
    if (n > 1) {
        group->group_begin();
        if (world().rank() == 0) group->send(tensor_of(own), 1);
        if (world().rank() == 0) group->send(tensor_of(own), 1);
        if (world().rank() == 1) group->recv(tensor_of(own), 0);
        if (world().rank() == 1) group->recv(tensor_of(own), 0);
        group->group_end();
        EXPECT_EQ(bytes_of(*group, CallKind::send), world().rank() == 0 ? 2 * part * element : 0);
        EXPECT_EQ(bytes_of(*group, CallKind::recv), world().rank() == 1 ? 2 * part * element : 0);
        EXPECT_EQ(group->traffic(CallKind::recv).calls, world().rank() == 1 ? 2u : 0u);
    }
    group->barrier();
    EXPECT_EQ(bytes_of(*group, CallKind::all_gather), (n - 1) * part * element) << "a barrier sends nothing";
    EXPECT_EQ(group->traffic(CallKind::all_gather).calls, 1u);
}

// Messages longer than MPI's int counts are cut. This test cuts at 1000 bytes, so that it needs no gigabytes.
TEST(LongMessages, AreCut) {
    HostCommunicator cutting(test::transport(), ExchangeOptions{.largest_message = 1000});
    for (const std::size_t count : {249, 250, 251, 10007}) {
        auto x = contribution<float>(world().rank(), count);
        cutting.all_reduce(tensor_of(x));  // with the communicator's own small staging
        EXPECT_TRUE(same_bits(x, expected_sum<float>(world().size(), count)));
        std::vector<float> all(count * ranks());
        cutting.all_gather(tensor_of(all), tensor_of(x));
        for (int rank = 0; rank < world().size(); ++rank)
            EXPECT_TRUE(same_bits(part_of(all, rank, count), x));
        cutting.broadcast(tensor_of(all), 0);
        EXPECT_TRUE(same_bits(part_of(all, world().size() - 1, count), x));
    }
}

// No rank leaves the barrier before the last rank, rank 0, has entered it. On one machine they share a clock.
TEST(Barrier, WaitsForAll) {
    using Clock = std::chrono::steady_clock;
    world().barrier();
    if (world().rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::vector<double> come{std::chrono::duration<double>(Clock::now().time_since_epoch()).count()};
    world().barrier();
    const double left = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    world().broadcast(tensor_of(come), 0);
    EXPECT_GE(left, come[0]);
}

TEST(Staging, IsBoundedAndNoneForOneRank) {
    EXPECT_EQ(HostCommunicator::staging_bytes(1), 0u);
    EXPECT_EQ(HostCommunicator::staging_bytes(2), std::size_t{1} << 20);
    std::size_t before = 0;
    for (const int size : {2, 3, 4, 8, 17, 18, 64, 1000}) {
        const std::size_t bytes = HostCommunicator::staging_bytes(size);
        EXPECT_GT(bytes, before / 2) << size;
        EXPECT_LE(bytes, std::size_t{16} << 20) << size;
        EXPECT_EQ(bytes % (2 * static_cast<std::size_t>(size - 1) * 1024), 0u) << size;
        before = bytes;
    }
}

TEST(Misuse, IsRefusedBeforeAnythingIsSent) {
    std::vector<float> x(ranks() * 4);
    std::vector<std::int32_t> integers(ranks() * 4);
    const Tensor whole = tensor_of(x);
    const Tensor own = whole.flat(world().rank() * 4, 4);
    EXPECT_THROW(world().reduce_scatter(whole.flat(0, 3), whole), ProgrammingError);
    EXPECT_THROW(world().all_gather(whole, whole.flat(0, 3)), ProgrammingError);
    EXPECT_THROW(world().all_reduce(tensor_of(integers)), ProgrammingError);
    EXPECT_THROW(world().reduce_scatter(tensor_of(integers).flat(0, 4), tensor_of(integers)),
                 ProgrammingError);
    EXPECT_THROW(world().all_gather(tensor_of(integers), own), ProgrammingError);
    EXPECT_THROW(world().broadcast(whole, world().size()), ProgrammingError);
    EXPECT_THROW(world().send(whole, world().rank()), ProgrammingError);
    EXPECT_THROW(world().recv(whole, world().size()), ProgrammingError);
    EXPECT_THROW(world().group_end(), ProgrammingError);
    world().group_begin();
    EXPECT_THROW(world().all_reduce(whole), ProgrammingError);
    EXPECT_THROW(world().barrier(), ProgrammingError);
    EXPECT_THROW(world().group_begin(), ProgrammingError);
    world().group_end();
    if (world().size() > 1) {
        const Tensor other = whole.flat((world().rank() + 1) % world().size() * 4, 4);
        EXPECT_THROW(world().reduce_scatter(other, whole), ProgrammingError);
        EXPECT_THROW(world().all_gather(whole, other), ProgrammingError);
        use_chunks(0);
        EXPECT_THROW(world().all_reduce(whole), ProgrammingError);
        use_chunks(1000);
    }
}

TEST(Misuse, RanksThatDisagreeOnASizeAreTold) {
    if (world().size() == 1) GTEST_SKIP() << "needs a peer";
    std::vector<float> x(4);
    for (const std::int64_t expected : {3, 5}) {
        if (world().rank() == 0) world().send(tensor_of(x), 1);
        if (world().rank() == 1) {
            std::vector<float> room(5);
            try {
                world().recv(tensor_of(room).flat(0, expected), 0);
                ADD_FAILURE() << "16 bytes are not " << 4 * expected;
            } catch (const ProgrammingError& error) {
                const std::string what = error.what();
                // MPI itself reports a message that is too long.
                const std::string told =
                    fmt::format("rank 0 sent 16 bytes where rank 1 expects {}", 4 * expected);
                EXPECT_TRUE(what.find(told) != std::string::npos ||
                            (expected == 3 && what.find("truncated") != std::string::npos))
                    << what;
            }
        }
    }
}

}  // namespace
}  // namespace llmc
