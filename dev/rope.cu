// Rotary positions, in three variants (llmc/device/ops.h). In rows of H heads of D elements, each pair (x_i,
// x_{i+D/2}) of a head is turned by an angle that belongs to its position and to i; in place. (cos, sin) come
// from a table in fp32.
//
// Memory is the limit: 2 N H D elements (read and written), and the angles of T positions once, 4 T D bytes.
// All heads of a position have the same angles. If each head reads them again, these are twice as many bytes
// as the head in bf16, mostly from caches.
//   1  A thread does a pair. It reads 2 elements and 8 bytes of angles, and writes 2 elements.
//   2  16 bytes of each half a thread: fewer instructions for the same bytes. The angles are still read for
//      each head.
//   3  A thread does the same piece of several heads, with its angles in registers. The loads of four heads
//      are in flight at once (llmc/device/cuda/rope.cuh).
#include "llmc/device/cuda/rope.cuh"

#include "dev/lab/lab.h"

namespace lab::rope_variants {

using namespace llmc::cuda;

struct Sizes {
    std::int64_t rows, sequence, position;
    int heads, half;
};

template <class X>
__global__ void rope_kernel1(HeadPlaces<X> x, const float* angles, Sizes s, float sign) {
    const std::int64_t pair = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int i = static_cast<int>(pair % s.half);
    const int head = static_cast<int>(pair / s.half % s.heads);
    const std::int64_t row = pair / s.half / s.heads;
    if (row >= s.rows) return;
    const float* const own = angles + 2 * ((s.position + row % s.sequence) * s.half + i);
    const float cos = own[0], sin = sign * own[1];
    X* const low = x.at(static_cast<unsigned>(row), head, 2 * s.half, i);
    const float a = to_float(low[0]), b = to_float(low[s.half]);
    low[0] = from_float<X>(a * cos - b * sin);
    low[s.half] = from_float<X>(b * cos + a * sin);
}

template <class X>
__global__ void rope_kernel2(HeadPlaces<X> x, const float* angles, Sizes s, float sign) {
    constexpr int pack = Packed<X>::size;
    const int pieces = s.half / pack;
    const std::int64_t piece = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int i = static_cast<int>(piece % pieces) * pack;
    const int head = static_cast<int>(piece / pieces % s.heads);
    const std::int64_t row = piece / pieces / s.heads;
    if (row >= s.rows) return;
    const float* const own = angles + 2 * ((s.position + row % s.sequence) * s.half + i);
    X* const first = x.at(static_cast<unsigned>(row), head, 2 * s.half, i);
    Packed<X> low = load(first), high = load(first + s.half);
    for (int k = 0; k < pack; k += 2) {
        const Packed<float> angle = load(own + 2 * k);
        for (int j = 0; j < 2; ++j) {
            const float cos = angle[2 * j], sin = sign * angle[2 * j + 1];
            const float a = to_float(low[k + j]), b = to_float(high[k + j]);
            low[k + j] = from_float<X>(a * cos - b * sin);
            high[k + j] = from_float<X>(b * cos + a * sin);
        }
    }
    store(first, low);
    store(first + s.half, high);
}

// Heads from element `first` on, with other elements behind them: as q and k beside v.
template <class X>
class Rope : public Problem {
  public:
    Rope(const Shape& shape, Draw& draw)
        : sizes_{shape[0] * shape[1], shape[1], 3, static_cast<int>(shape[2]),
                 static_cast<int>(shape[3] / 2)},
          row_(first + shape[2] * shape[3] + behind),
          x_(sizes_.rows * row_),
          before_(sizes_.rows * row_),
          angles_((sizes_.position + sizes_.sequence) * shape[3]) {
        draw.normal(before_, 1);
        for (std::int64_t i = 0; i < angles_.size(); i += 2) {
            const double angle = 1e-3 * static_cast<double>(draw.below(6283));
            angles_[i] = static_cast<float>(std::cos(angle));
            angles_[i + 1] = static_cast<float>(std::sin(angle));
        }
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const HeadPlaces<X> x{x_.data() + first, row_};
        const auto launch_pieces = [&](auto kernel, int size) {
            const std::int64_t pieces = sizes_.rows * sizes_.heads * (sizes_.half / size);
            launch(on, kernel, static_cast<unsigned>(blocks_for<std::int64_t>(pieces, block_size)),
                   block_size, 0, x, angles_.data(), sizes_, 1.0f);
        };
        switch (variant) {
            case 1:
                return launch_pieces(rope_kernel1<X>, 1);
            case 2:
                return launch_pieces(rope_kernel2<X>, Packed<X>::size);
            case 3:
                return llmc::cuda::rope(on, x, angles_.data(), sizes_.rows, sizes_.sequence, sizes_.heads,
                                        2 * sizes_.half, sizes_.position, false, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { x_.copy_from(before_); }

    void compare(Comparison& comparison) override {
        // Each of the two products is rounded, and their difference.
        constexpr double u = unit_roundoff<float>;
        const int half = sizes_.half;
        for (std::int64_t i = 0; i < x_.size(); ++i) {
            const std::int64_t row = i / row_, place = i % row_ - first;
            if (place < 0 || place >= 2 * half * sizes_.heads) {
                comparison.see_equal("other", i, to_float(x_[i]), to_float(before_[i]));
                continue;
            }
            const std::int64_t in_head = place % (2 * half), pair = in_head % half;
            const bool is_low = in_head < half;
            const std::int64_t angle = 2 * ((sizes_.position + row % sizes_.sequence) * half + pair);
            const double own = to_float(before_[i]) * double{angles_[angle]};
            const double other = (is_low ? -1 : 1) * to_float(before_[is_low ? i + half : i - half]) *
                                 double{angles_[angle + 1]};
            const double error = u * (std::fabs(own) + std::fabs(other) + std::fabs(own + other));
            comparison.see("x", i, to_float(x_[i]), own + other, rounded<X>(own + other, error));
        }
    }

    double bytes() const override {
        return 4.0 * static_cast<double>(sizes_.rows * sizes_.heads * sizes_.half) * sizeof(X) +
               8.0 * static_cast<double>(sizes_.sequence * sizes_.half);
    }

  private:
    static constexpr std::int64_t first = 8, behind = 16;
    Sizes sizes_;
    std::int64_t row_;
    Array<X> x_, before_;
    Array<float> angles_;
};

const Registration registration({
    .name = "rope",
    .sizes = {"B", "T", "heads", "head size"},
    .variants = {{1, "a thread does a pair", {32, 128, 256}},
                 {2, "16-byte accesses", {32, 128, 256}},
                 {3, "angles kept for several heads, four in flight", {32, 128, 256, 512}}},
    .checked = {{2, 3, 5, 16}, {1, 4, 2, 24}, {2, 5, 9, 128}},
    .timed = {{8, 1024, 40, 128}, {8, 1024, 20, 64}},
    .takes =
        [](int variant, llmc::DType dtype, const Shape& shape) {
            return variant != 2 || dtype == llmc::DType::fp32 || shape[3] % 16 == 0;
        },
    .make = make_problem<Rope>,
    // The second has halves that are not whole pieces of 16 bytes in bf16. Both have two blocks.
    .checked_for_races = {{2, 9, 9, 16}, {2, 5, 9, 24}},
});

}  // namespace lab::rope_variants
