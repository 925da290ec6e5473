// Conformance of the wrappers of ptx.cuh. Their results are compared with the PTX manual (ISA 9.0), which is
// implemented here independently. On the executor this tests the meanings of test/simt/ptx_on_cpu.h; compiled
// by nvcc, it tests the instructions of a GPU. Both must pass the same test.
#include "llmc/device/cuda/ptx.cuh"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <vector>

#include "test/kernels/kernel_test.h"

// In a named namespace, since kernels are identified by their symbols.
namespace kernel_test::ptx_kernels {

using namespace llmc::cuda;

// The arrays hold the registers of each thread, one thread after another.
template <class X>
__global__ void mma(float* d, const std::uint32_t* a, const std::uint32_t* b) {
    const int thread = static_cast<int>(threadIdx.x);
    float d_registers[4];
    std::uint32_t a_registers[4], b_registers[2];
    for (int i = 0; i < 4; ++i) d_registers[i] = d[4 * thread + i];
    for (int i = 0; i < 4; ++i) a_registers[i] = a[4 * thread + i];
    for (int i = 0; i < 2; ++i) b_registers[i] = b[2 * thread + i];
    mma_m16n8k16<X>(d_registers, a_registers, b_registers);
    for (int i = 0; i < 4; ++i) d[4 * thread + i] = d_registers[i];
}

// Row l of the four matrices is stored at place[l] of 64.
template <bool transposed>
__global__ void ldmatrix(std::uint32_t* fragments, const uint4* rows, const int* place) {
    SHARED(uint4, memory, [64]);
    const int lane = static_cast<int>(threadIdx.x);
    memory[place[lane]] = rows[lane];
    __syncwarp();
    std::uint32_t registers[4];
    if constexpr (transposed) {
        ldmatrix_x4_transposed(registers, &memory[place[lane]]);
    } else {
        ldmatrix_x4(registers, &memory[place[lane]]);
    }
    for (int i = 0; i < 4; ++i) fragments[4 * lane + i] = registers[i];
}

constexpr int copying_threads = 64, copies = 3;

// Copies 0 and 1 are in the first group, 2 in the second. A thread sees its own copies after its wait, and
// its neighbor's after a barrier.
__global__ void copy_async(uint4* out, const uint4* in, const int* valid) {
    SHARED(uint4, memory, [copies][copying_threads]);
    const int thread = static_cast<int>(threadIdx.x);
    const auto copy = [&](int i) {
        copy_async_16(&memory[i][thread], in + i * copying_threads + thread,
                      valid[i * copying_threads + thread] != 0);
    };
    for (auto& of_copy : memory) of_copy[thread] = uint4{1, 2, 3, 4};
    copy(0);
    copy(1);
    copy_async_commit();
    copy(2);
    copy_async_commit();
    copy_async_wait<1>();
    out[thread] = memory[0][thread];
    out[copying_threads + thread] = memory[1][thread];
    copy_async_wait<0>();
    out[2 * copying_threads + thread] = memory[2][thread];
    __syncthreads();
    out[3 * copying_threads + thread] = memory[2][(thread + 1) % copying_threads];
}

// Empty groups count: the newest of these three is empty, so a wait for all but one group waits for the copy.
__global__ void copy_async_empty_groups(uint4* out, const uint4* in) {
    SHARED(uint4, memory, [copying_threads]);
    const int thread = static_cast<int>(threadIdx.x);
    copy_async_commit();
    copy_async_16(&memory[thread], in + thread, true);
    copy_async_commit();
    copy_async_commit();
    copy_async_wait<1>();
    out[thread] = memory[thread];
}

__global__ void exp2(float* out, const float* in) { out[threadIdx.x] = exp2_approximate(in[threadIdx.x]); }
__global__ void reciprocal(float* out, const float* in) {
    out[threadIdx.x] = reciprocal_approximate(in[threadIdx.x]);
}
__global__ void tanh(float* out, const float* in) { out[threadIdx.x] = tanh_approximate(in[threadIdx.x]); }
__global__ void lane(int* out) { out[threadIdx.x] = lane_id(); }
template <class X>
__global__ void pack(std::uint32_t* out, const float* low, const float* high) {
    out[threadIdx.x] = pack_pair<X>(low[threadIdx.x], high[threadIdx.x]);
}

}  // namespace kernel_test::ptx_kernels

namespace kernel_test {
namespace {

constexpr int warps = 2, threads = 32 * warps;

class Ptx : public testing::Test {
  protected:
    template <class... Parameters, class... Arguments>
    void run(void (*kernel)(Parameters...), int block, Arguments... arguments) {
        llmc::cuda::launch(launch_contexts().front(), kernel, 1, static_cast<unsigned>(block), 0,
                           arguments...);
        synchronize();
    }

    Draw draw_{seed()};

  private:
    UnreportedKernels unreported_;
};

template <class X>
std::uint32_t bits(X x) {
    std::uint16_t as_stored;
    std::memcpy(&as_stored, static_cast<const void*>(&x), sizeof as_stored);
    return as_stored;
}

// ---- mma.m16n8k16 ----

// The row and column of fragment element i ("Matrix Fragments for mma.m16n8k16 with floating point type"),
// for .bf16 or .f16 A and B and .f32 C and D.
struct Place {
    int row, column;
};
Place place_of_a(int lane, int i) {
    const int group = lane >> 2, thread_in_group = lane % 4;
    return {(0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8,
            i < 4 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8};
}
Place place_of_b(int lane, int i) {
    const int group = lane >> 2, thread_in_group = lane % 4;
    return {i < 2 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8, group};
}
Place place_of_d(int lane, int i) {
    const int group = lane >> 2, thread_in_group = lane % 4;
    return {i < 2 ? group : group + 8, thread_in_group * 2 + (i & 1)};
}

template <class X>
class PtxMma : public Ptx {
  protected:
    // Computes D = A B + C of each warp, with A 16x16, B 16x8, C and D 16x8 in row-major order, one warp's
    // after another's.
    std::vector<float> multiply(const Array<X>& a, const Array<X>& b, const Array<float>& c) {
        Array<std::uint32_t> a_registers(threads * 4), b_registers(threads * 2);
        Array<float> d_registers(threads * 4);
        // Two elements per register, the first in its lower half.
        const auto pair = [](X first, X second) { return bits(first) | bits(second) << 16; };
        for (int thread = 0; thread < threads; ++thread) {
            const int warp = thread / 32, lane = thread % 32;
            const auto a_at = [&](Place p) { return a[(warp * 16 + p.row) * 16 + p.column]; };
            const auto b_at = [&](Place p) { return b[(warp * 16 + p.row) * 8 + p.column]; };
            for (int i = 0; i < 8; i += 2) {
                a_registers[thread * 4 + i / 2] =
                    pair(a_at(place_of_a(lane, i)), a_at(place_of_a(lane, i + 1)));
            }
            for (int i = 0; i < 4; i += 2) {
                b_registers[thread * 2 + i / 2] =
                    pair(b_at(place_of_b(lane, i)), b_at(place_of_b(lane, i + 1)));
            }
            for (int i = 0; i < 4; ++i) {
                const auto [row, column] = place_of_d(lane, i);
                d_registers[thread * 4 + i] = c[(warp * 16 + row) * 8 + column];
            }
        }
        run(ptx_kernels::mma<X>, threads, d_registers.data(), a_registers.data(), b_registers.data());
        std::vector<float> d(static_cast<std::size_t>(c.size()));
        for (int thread = 0; thread < threads; ++thread) {
            for (int i = 0; i < 4; ++i) {
                const auto [row, column] = place_of_d(thread % 32, i);
                d[static_cast<std::size_t>((thread / 32 * 16 + row) * 8 + column)] =
                    d_registers[thread * 4 + i];
            }
        }
        return d;
    }

    // `unit` is the bound of a sum's error, relative to the sum of its terms' magnitudes.
    void expect_product(double unit) {
        const std::vector<float> d = multiply(a_, b_, c_);
        Comparison comparison;
        for (int i = 0; i < warps * 16 * 8; ++i) {
            const int row = i / 8, column = i % 8;
            double sum = c_[i], magnitude = std::fabs(sum);
            for (int k = 0; k < 16; ++k) {
                const double product =
                    double{to_float(a_[row * 16 + k])} * to_float(b_[(row / 16 * 16 + k) * 8 + column]);
                sum += product;
                magnitude += std::fabs(product);
            }
            comparison.see("d", i, d[static_cast<std::size_t>(i)], sum, unit * magnitude + 0x1p-1000);
        }
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }

    Array<X> a_{warps * 16 * 16}, b_{warps * 16 * 8};
    Array<float> c_{warps * 16 * 8};
};
TYPED_TEST_SUITE(PtxMma, HalfDtypes);

// Small integers, whose sums are all exact: any element in a wrong place shows.
TYPED_TEST(PtxMma, WholeNumbers) {
    const auto draw_whole = [&](auto& to) {
        for (std::int64_t i = 0; i < to.size(); ++i) {
            using X = std::remove_reference_t<decltype(to[i])>;
            to[i] = llmc::cuda::from_float<X>(static_cast<float>(this->draw_.below(201) - 100));
        }
    };
    draw_whole(this->a_);
    draw_whole(this->b_);
    draw_whole(this->c_);
    this->expect_product(0);
}

// Products of bf16 or of fp16 are exact in fp32. The manual does not specify the order and the rounding of the
// additions. A possible way is to shift four products (or more) and the sum so far to the exponent of the
// largest, truncate, add, and truncate again. That is 6 times 2 u for 4 products.
TYPED_TEST(PtxMma, RealNumbers) {
    this->draw_.normal(this->a_, 1);
    this->draw_.normal(this->b_, 1);
    this->draw_.normal(this->c_, 1);
    this->expect_product(3 * 16 * lab::unit_roundoff<float>);
}

// ---- ldmatrix ----

class PtxLdmatrix : public Ptx {
  protected:
    // `wanted` is the element that should be in the lower (0) or upper (1) half of a lane's fragment.
    void expect_fragments(void (*kernel)(std::uint32_t*, const uint4*, const int*),
                          std::uint16_t (*wanted)(const Array<std::uint16_t>&, int matrix, int lane,
                                                  int half)) {
        Array<std::uint16_t> elements(4 * 8 * 8);  // by matrix, row and column
        std::vector<int> distinct(1 << 16);
        std::iota(distinct.begin(), distinct.end(), 0);
        for (std::int64_t i = 0; i < elements.size(); ++i) {  // no two the same
            std::swap(distinct[static_cast<std::size_t>(i)],
                      distinct[static_cast<std::size_t>(i + draw_.below((1 << 16) - i))]);
            elements[i] = static_cast<std::uint16_t>(distinct[static_cast<std::size_t>(i)]);
        }
        Array<int> place(64);
        std::iota(place.data(), place.data() + 64, 0);
        for (int i = 0; i < 64; ++i) std::swap(place[i], place[i + draw_.below(64 - i)]);
        Array<uint4> rows(32);
        std::memcpy(rows.data(), elements.data(), rows.bytes());
        Array<std::uint32_t> fragments(32 * 4);
        run(kernel, 32, fragments.data(), rows.data(), place.data());
        for (int lane = 0; lane < 32; ++lane) {
            for (int matrix = 0; matrix < 4; ++matrix) {
                const std::uint32_t expected = wanted(elements, matrix, lane, 0) |
                                               std::uint32_t{wanted(elements, matrix, lane, 1)} << 16;
                EXPECT_EQ(fragments[lane * 4 + matrix], expected) << "lane " << lane << " matrix " << matrix;
            }
        }
    }
};

// "Each thread receives a fragment from the row": row lane / 4, elements 2 (lane % 4) and the next. Threads 8
// m ... 8 m + 7 give the addresses of the rows of matrix m.
TEST_F(PtxLdmatrix, RowsAsTheyAre) {
    expect_fragments(ptx_kernels::ldmatrix<false>,
                     [](const Array<std::uint16_t>& elements, int matrix, int lane, int half) {
                         return elements[matrix * 64 + lane / 4 * 8 + lane % 4 * 2 + half];
                     });
}

// ".trans: the matrix is loaded in column-major format": rows and columns are exchanged.
TEST_F(PtxLdmatrix, Transposed) {
    expect_fragments(ptx_kernels::ldmatrix<true>,
                     [](const Array<std::uint16_t>& elements, int matrix, int lane, int half) {
                         return elements[matrix * 64 + (lane % 4 * 2 + half) * 8 + lane / 4];
                     });
}

// ---- cp.async ----

class PtxCopyAsync : public Ptx {
  protected:
    static constexpr int n = ptx_kernels::copying_threads, copies = ptx_kernels::copies;

    void draw_bits(Array<uint4>& to) {
        const auto word = [&] { return static_cast<std::uint32_t>(draw_.below(std::int64_t{1} << 32)); };
        for (std::int64_t i = 0; i < to.size(); ++i) to[i] = {word(), word(), word(), word()};
    }
    static void expect_same(const uint4& got, const uint4& wanted, std::int64_t i) {
        EXPECT_EQ(std::memcmp(&got, &wanted, sizeof got), 0) << "copy " << i;
    }
};

// "src-size less than cp-size: the remaining bytes are filled with zeros"; with 0 bytes, all are.
TEST_F(PtxCopyAsync, CopiesOrWritesZeros) {
    Array<uint4> in(copies * n), out((copies + 1) * n);
    Array<int> valid(copies * n);
    draw_bits(in);
    for (int i = 0; i < copies * n; ++i) valid[i] = static_cast<int>(draw_.below(2));
    run(ptx_kernels::copy_async, n, out.data(), in.data(), valid.data());
    const auto wanted = [&](int i) { return valid[i] != 0 ? in[i] : uint4{0, 0, 0, 0}; };
    for (int i = 0; i < copies * n; ++i) expect_same(out[i], wanted(i), i);
    for (int i = 0; i < n; ++i) expect_same(out[copies * n + i], wanted(2 * n + (i + 1) % n), i);
}

TEST_F(PtxCopyAsync, EmptyGroupsCount) {
    Array<uint4> in(n), out(n);
    draw_bits(in);
    run(ptx_kernels::copy_async_empty_groups, n, out.data(), in.data());
    for (int i = 0; i < n; ++i) expect_same(out[i], in[i], i);
}

// ---- special registers ----

// %laneid: "a thread's lane within the warp". A warp of a block in one dimension is 32 consecutive threads.
TEST_F(Ptx, LaneId) {
    Array<int> out(threads);
    run(ptx_kernels::lane, threads, out.data());
    for (int thread = 0; thread < threads; ++thread) EXPECT_EQ(out[thread], thread % 32);
}

// ---- approximate functions ----

class PtxFunction : public Ptx {
  protected:
    static constexpr int n = 256;

    // Special numbers first, then normal ones.
    void draw_inputs(Array<float>& in, double deviation) {
        draw_.normal(in, deviation);
        const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 0x1p-140f, -0x1p-140f, 1.0f};
        std::copy(std::begin(special), std::end(special), in.data());
    }
    static void expect_near(const Array<float>& in, const Array<float>& out, double (*function)(double),
                            double relative, double absolute) {
        Comparison comparison;
        for (int i = 0; i < n; ++i) {
            const double wanted = function(in[i]);
            if (std::isnan(wanted)) {
                EXPECT_TRUE(std::isnan(out[i])) << in[i];
            } else if (std::isinf(wanted)) {
                EXPECT_EQ(out[i], wanted) << in[i];
            } else {
                comparison.see("out", i, out[i], wanted, relative * std::fabs(wanted) + absolute + 0x1p-1000);
            }
        }
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }
};

// 2 ulp; results below the normal range may be flushed to 0. 2^x is infinite in fp32 from x = 128 on.
TEST_F(PtxFunction, Exp2) {
    Array<float> in(n), out(n);
    draw_inputs(in, 40);
    for (int i = 0; i < n; ++i) {
        if (in[i] > 127.5f && in[i] < INFINITY) in[i] = 127.5f;
    }
    in[8] = 128;
    in[9] = 1000;
    in[10] = -149.5f;
    in[11] = -1000;
    run(ptx_kernels::exp2, n, out.data(), in.data());
    EXPECT_EQ(out[0], 1);
    EXPECT_EQ(out[1], 1);
    EXPECT_EQ(out[3], 0);
    for (const int i : {8, 9}) {
        EXPECT_EQ(out[i], INFINITY);
        out[i] = in[i] = INFINITY;
    }
    expect_near(
        in, out, [](double x) { return std::exp2(x); }, 2 * 0x1p-23, 0x1p-126);
}

// 1 ulp; a number below the normal range may count as 0, and the result may be 0.
TEST_F(PtxFunction, Reciprocal) {
    Array<float> in(n), out(n);
    draw_inputs(in, 40);
    in[8] = 0x1.8p127f;
    run(ptx_kernels::reciprocal, n, out.data(), in.data());
    in[5] = 0.0f;
    in[6] = -0.0f;
    expect_near(
        in, out, [](double x) { return 1 / x; }, 0x1p-23, 0x1p-126);
}

TEST_F(PtxFunction, Tanh) {
    Array<float> in(n), out(n);
    draw_inputs(in, 2);
    run(ptx_kernels::tanh, n, out.data(), in.data());
    EXPECT_EQ(out[0], 0);
    EXPECT_FALSE(std::signbit(out[0]));
    EXPECT_TRUE(std::signbit(out[1]));
    EXPECT_EQ(out[2], 1);
    EXPECT_EQ(out[3], -1);
    expect_near(
        in, out, [](double x) { return std::tanh(x); }, 0x1p-11, 0);
}

// ---- rounding ----

// The bits of the nearest X; of two equally near, the one whose last bit is 0.
template <class X>
std::uint32_t rounded_bits(float x) {
    if constexpr (std::is_same_v<X, fp16>) return llmc::to_float16(x).bits;  // all of it is tested on the CPU
    const auto full = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t lower = full & 0xffffu, upper = full >> 16;
    const bool up = lower > 0x8000u || (lower == 0x8000u && upper % 2 == 1);
    return upper + up;
}

// The number halfway between the X with these bits and the next.
template <class X>
float halfway(std::uint32_t bits) {
    if constexpr (std::is_same_v<X, bf16>) return std::bit_cast<float>(bits << 16 | 0x8000u);
    const llmc::float16 first{static_cast<std::uint16_t>(bits)}, next{static_cast<std::uint16_t>(bits + 1)};
    return (llmc::to_float(first) + llmc::to_float(next)) / 2;
}

template <class X>
class PtxPack : public PtxFunction {};
TYPED_TEST_SUITE(PtxPack, HalfDtypes);

TYPED_TEST(PtxPack, RoundsToNearest) {
    using X = TypeParam;
    constexpr int count = PtxFunction::n;
    Array<float> low(count), high(count);
    Array<std::uint32_t> out(count);
    for (Array<float>* each : {&low, &high}) {
        for (int i = 0; i < count; ++i) {
            const auto random = static_cast<std::uint32_t>(this->draw_.below(std::int64_t{1} << 32));
            (*each)[i] = std::bit_cast<float>(random);
            if (i % 2 == 0) (*each)[i] = halfway<X>(random >> 16);
        }
    }
    low[0] = high[1] = NAN;
    low[2] = high[3] = INFINITY;
    low[4] = high[5] = 0x1.fffffep127f;  // rounds to infinity
    low[6] = high[7] = -0.0f;
    low[8] = high[9] = 0x1p-140f;
    this->run(ptx_kernels::pack<X>, count, out.data(), low.data(), high.data());
    const auto expect_half = [](std::uint32_t got, float x) {
        if (std::isnan(x)) {
            const std::uint32_t exponent = std::is_same_v<X, fp16> ? 0x7c00u : 0x7f80u;
            EXPECT_TRUE((got & exponent) == exponent && (got & 0x7fffu & ~exponent) != 0);
        } else {
            EXPECT_EQ(got, rounded_bits<X>(x)) << x;
        }
    };
    for (int i = 0; i < count; ++i) {
        expect_half(out[i] & 0xffffu, low[i]);
        expect_half(out[i] >> 16, high[i]);
    }
}

}  // namespace
}  // namespace kernel_test
