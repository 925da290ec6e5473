// Casts, fills, sums and the test for NaN and infinity, compared with the CPU device. Lengths are not
// multiples of anything, addresses are not multiples of 16 bytes, and no element beyond the end may change.
#include "llmc/device/cuda/elementwise.cuh"

#include <bit>
#include <cstring>

#include "llmc/device/cuda/checksum.h"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

// The contexts of all tests, and one with a single multiprocessor, whose blocks go over many pieces.
std::vector<LaunchContext> contexts() {
    auto all = launch_contexts();
    all.push_back(all.front());
    all.back().chip.multiprocessors = 1;
    return all;
}

struct Piece {
    std::int64_t elements;
    std::int64_t offset;  // elements between an address that is a multiple of 256 and the first one
};
const std::vector<Piece> pieces = {{37, 0},   {1, 0},      {3, 1},      {4096, 0},
                                   {4099, 3}, {100003, 0}, {100000, 8}, {18832, 0}};
// Several blocks of both kinds: by packs and by elements.
const std::vector<Piece> pieces_for_races = {{2203, 0}, {600, 1}};

// A piece in the middle of memory that must not change.
template <class T>
struct Guarded {
    static constexpr std::int64_t margin = 32;

    explicit Guarded(const Piece& piece)
        : elements(piece.elements), begin(margin + piece.offset), all(begin + elements + margin) {}

    T* data() { return all.data() + begin; }
    T& operator[](std::int64_t i) { return all[begin + i]; }
    llmc::Tensor on_cpu() { return tensor(all, {all.size()}).flat(begin, elements); }

    // Compares bits, except those of a NaN in the piece itself.
    void expect_same(const Guarded& other) const {
        for (std::int64_t i = 0; i < all.size(); ++i) {
            const bool inside = begin <= i && i < begin + elements;
            if (inside && all[i] != all[i] && other.all[i] != other.all[i]) continue;
            // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): bits are what is compared
            ASSERT_EQ(std::memcmp(&all[i], &other.all[i], sizeof(T)), 0) << i - begin << " of " << elements;
        }
    }

    std::int64_t elements, begin;
    Array<T> all;
};

// Random bits, which include denormal numbers, infinities and NaNs. The surrounding elements are ones, so
// that a stray read shows.
void draw_bits(Guarded<float>& to, Draw& draw) {
    to.all.fill(1);
    for (std::int64_t i = 0; i < to.elements; ++i) {
        to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(draw.below(std::int64_t{1} << 32)));
        if (i % 4 == 0) {  // halfway between two bf16
            to[i] = std::bit_cast<float>((std::bit_cast<std::uint32_t>(to[i]) & 0xffff0000u) | 0x8000u);
        }
    }
}
template <class X>
void draw_bits(Guarded<X>& to, Draw& draw) {
    to.all.fill(llmc::cuda::from_float<X>(1));
    for (std::int64_t i = 0; i < to.elements; ++i) {
        const auto bits = static_cast<std::uint16_t>(draw.below(1 << 16));
        std::memcpy(static_cast<void*>(&to[i]), &bits, sizeof bits);
    }
}

template <class X>
class Elementwise : public Kernels<X> {};
TYPED_TEST_SUITE(Elementwise, Dtypes);

template <class To, class From>
void test_cast() {
    Draw draw(seed());
    for (const auto& on : contexts()) {
        for (const Piece& piece : shapes(pieces, pieces_for_races)) {
            Guarded<From> in(piece);
            Guarded<To> out(piece), expected(piece);
            draw_bits(in, draw);
            llmc::cuda::cast(on, out.data(), in.data(), piece.elements);
            synchronize();
            cpu().run(llmc::Cast{expected.on_cpu(), in.on_cpu()});
            out.expect_same(expected);
        }
    }
}
TEST(ElementwiseOther, CastToFp32) {
    test_cast<float, bf16>();
    test_cast<float, fp16>();
}
TEST(ElementwiseOther, CastFromFp32) {
    test_cast<bf16, float>();
    test_cast<fp16, float>();
}

TYPED_TEST(Elementwise, Add) {
    using X = TypeParam;
    Draw draw(seed());
    for (const auto& on : contexts()) {
        for (const Piece& piece : shapes(pieces, pieces_for_races)) {
            Guarded<X> a(piece), b(piece), out(piece), expected(piece);
            draw_bits(a, draw);
            draw_bits(b, draw);
            cpu().run(llmc::Add{expected.on_cpu(), a.on_cpu(), b.on_cpu()});
            llmc::cuda::add(on, out.data(), a.data(), b.data(), piece.elements);
            synchronize();
            out.expect_same(expected);
            Guarded<X> onto_a(piece), onto_b(piece);
            for (std::int64_t i = 0; i < piece.elements; ++i) {
                onto_a[i] = a[i];
                onto_b[i] = b[i];
            }
            llmc::cuda::add(on, onto_a.data(), onto_a.data(), b.data(), piece.elements);
            llmc::cuda::add(on, onto_b.data(), a.data(), onto_b.data(), piece.elements);
            synchronize();
            onto_a.expect_same(expected);
            onto_b.expect_same(expected);
        }
    }
}

// Operands with different offsets from 16 bytes.
TYPED_TEST(Elementwise, AddsWhereOneOperandIsMisaligned) {
    using X = TypeParam;
    Draw draw(seed());
    Guarded<X> a({1000, 0}), b({1000, 1}), out({1000, 0}), expected({1000, 0});
    draw_bits(a, draw);
    draw_bits(b, draw);
    cpu().run(llmc::Add{expected.on_cpu(), a.on_cpu(), b.on_cpu()});
    llmc::cuda::add(launch_contexts().front(), out.data(), a.data(), b.data(), 1000);
    synchronize();
    out.expect_same(expected);
}

template <class In>
class ElementwiseGradients : public Kernels<In> {};
TYPED_TEST_SUITE(ElementwiseGradients, Fp32AndBf16);

TYPED_TEST(ElementwiseGradients, Accumulate) {
    using In = TypeParam;
    Draw draw(seed());
    const llmc::StochasticRounding rounding{.seed = 5, .first_element = std::int64_t{1} << 40};
    const std::int64_t count = std::int64_t{7} << 32 | 3;
    for (const auto& on : contexts()) {
        for (const Piece& piece : shapes(pieces, pieces_for_races)) {
            Guarded<bf16> out(piece), expected(piece);
            Guarded<In> in(piece);
            draw_bits(out, draw);
            draw_bits(in, draw);
            for (std::int64_t i = 0; i < piece.elements; ++i) {
                // A sum of two numbers with random bits is mostly one of them. So half of these have a
                // similar magnitude.
                if (i % 2 == 0)
                    in[i] = llmc::cuda::from_float<In>(to_float(out[i]) * static_cast<float>(draw.below(7)) /
                                                       512);
            }
            expected.all.copy_from(out.all);
            cpu().run(llmc::Accumulate{expected.on_cpu(), in.on_cpu(), rounding, count});
            llmc::cuda::accumulate(on, out.data(), in.data(), piece.elements, rounding, count);
            synchronize();
            out.expect_same(expected);
        }
    }
}

template <class T>
void test_fill() {
    for (const auto& on : contexts()) {
        for (const Piece& piece : shapes(pieces, pieces_for_races)) {
            Guarded<T> out(piece), expected(piece);
            T value;
            if constexpr (sizeof(T) == 2) {
                value = llmc::cuda::from_float<T>(-2.6f);
            } else {
                value = static_cast<T>(-2.6f);
            }
            llmc::cuda::fill(on, out.data(), value, piece.elements);
            synchronize();
            cpu().run(llmc::Fill{expected.on_cpu(), -2.6f});
            out.expect_same(expected);
        }
    }
}
TYPED_TEST(Elementwise, Fill) { test_fill<TypeParam>(); }
TEST(ElementwiseOther, FillInt) { test_fill<std::int32_t>(); }

TYPED_TEST(Elementwise, AllFinite) {
    using X = TypeParam;
    Draw draw(seed());
    Array<std::int32_t> flag(1);
    const float not_finite[] = {NAN, INFINITY, -INFINITY, -NAN};
    bool first = true;  // whether it is the first of the contexts
    for (const auto& on : contexts()) {
        // The second piece has several blocks, each of which finds something.
        for (const Piece& piece : shapes(pieces, {{37, 0}, {4100, 0}})) {
            Guarded<X> x(piece);  // the surrounding elements are NaN
            for (std::int64_t i = 0; i < piece.elements; ++i) {
                x[i] = llmc::cuda::from_float<X>(i % 3 == 0 ? largest<X> : i % 3 == 1 ? 0.0f : 0x1p-133f);
            }
            const auto finite = [&] {
                flag.clear();
                llmc::cuda::all_finite(on, flag.data(), x.data(), piece.elements,
                                       piece.elements < 100 ? 32 : 256);
                synchronize();
                return flag[0];
            };
            EXPECT_EQ(finite(), 1) << piece.elements;
            // At all places of a short piece; at the ends and at a random place of a long one.
            std::vector<std::int64_t> places = {0, piece.elements - 1, draw.below(piece.elements)};
            const std::int64_t everywhere = first && piece.elements < 100 ? piece.elements : 0;
            for (std::int64_t i = 0; i < everywhere; ++i) places.push_back(i);
            for (const std::int64_t place : places) {
                const X before = x[place];
                x[place] = llmc::cuda::from_float<X>(not_finite[draw.below(4)]);
                EXPECT_EQ(finite(), 0) << place << " of " << piece.elements;
                x[place] = before;
            }
            EXPECT_EQ(finite(), 1) << piece.elements;
            for (std::int64_t i = 0; i < piece.elements; ++i) x[i] = llmc::cuda::from_float<X>(NAN);
            EXPECT_EQ(finite(), 0) << piece.elements;
        }
        first = false;
    }
}

TEST(ElementwiseOther, ChecksumOfEveryBitAndPlace) {
    Draw draw(seed());
    Array<std::uint64_t> sum(1);
    for (const auto& on : contexts()) {
        for (const std::int64_t packs : {1, 37, 3000}) {  // the last in several blocks
            Array<std::uint64_t> x(2 * packs);
            for (std::int64_t i = 0; i < 2 * packs; ++i)
                x[i] = static_cast<std::uint64_t>(draw.below(1 << 30)) << 32 | draw.below(1 << 30);
            const auto checksum = [&](std::uint64_t before = 0) {
                sum[0] = before;
                llmc::cuda::add_checksum(on, reinterpret_cast<unsigned long long*>(sum.data()), x.data(),
                                         16 * packs);
                synchronize();
                return sum[0];
            };
            const std::uint64_t whole = checksum();
            EXPECT_EQ(checksum(), whole);
            EXPECT_EQ(checksum(whole), 2 * whole);
            std::uint64_t& place = x[draw.below(2 * packs)];
            const std::uint64_t bit = std::uint64_t{1} << draw.below(64);
            place ^= bit;
            EXPECT_NE(checksum(), whole);
            place ^= bit;
            if (packs == 1) continue;
            std::swap(x[0], x[2 * packs - 2]);
            std::swap(x[1], x[2 * packs - 1]);
            EXPECT_NE(checksum(), whole) << "of other places";
        }
    }
}

}  // namespace
}  // namespace kernel_test
