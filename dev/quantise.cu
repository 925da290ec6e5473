// A tensor in 8 bits, and the same transposed (llmc/device/cuda/fp8.cuh). Two bytes of each element are read and two
// are written, and the scale comes from memory. There are three variants.
//   1  A thread rounds an element and writes it to both copies. A warp writes 32 consecutive bytes of one, but
//      single bytes of 32 rows of the other.
//   2  A block takes a tile of 32 x 32 through shared memory, so that warps write 32 consecutive bytes of both.
//   3  A thread takes 4 x 4 elements and transposes their bytes in registers: all accesses are words or more.
#include "dev/lab/lab.h"
#include "llmc/device/cuda/fp8.cuh"

namespace lab::quantise_variants {

using namespace llmc::cuda;
using llmc::Fp8;

struct Arguments {
    std::uint8_t *plain, *transposed;
    float* inverse;
    const bf16* x;
    const std::uint32_t* amax;
    std::int64_t rows, columns;
};

template <Fp8 format>
__global__ void quantise_transpose_kernel1(Arguments a) {
    const float scale = fp8_scale_of<format>(a.amax, a.inverse);
    const std::int64_t i = grid_thread();
    if (i >= a.rows * a.columns) return;
    const auto byte = static_cast<std::uint8_t>(to_fp8<format>(a.x[i], scale));
    a.plain[i] = byte;
    a.transposed[i % a.columns * a.rows + i / a.columns] = byte;
}

constexpr int tile_size = 32, tile_rows = 8;

template <Fp8 format>
__global__ void quantise_transpose_kernel2(Arguments a) {
    SHARED(std::uint8_t, tile, [tile_size * (tile_size + 4)]);
    const float scale = fp8_scale_of<format>(a.amax, a.inverse);
    const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * tile_size;
    const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * tile_size;
    const int across = static_cast<int>(threadIdx.x) % tile_size,
              down = static_cast<int>(threadIdx.x) / tile_size;
    for (int row = down; row < tile_size; row += tile_rows) {
        const std::int64_t i = first_row + row, j = first_column + across;
        if (i >= a.rows || j >= a.columns) continue;
        const auto byte = static_cast<std::uint8_t>(to_fp8<format>(a.x[i * a.columns + j], scale));
        a.plain[i * a.columns + j] = byte;
        tile[across * (tile_size + 4) + row] = byte;
    }
    __syncthreads();
    for (int column = down; column < tile_size; column += tile_rows) {
        const std::int64_t j = first_column + column, i = first_row + across;
        if (i < a.rows && j < a.columns)
            a.transposed[j * a.rows + i] = tile[column * (tile_size + 4) + across];
    }
}

class Quantise : public Problem {
  public:
    Quantise(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          columns_(shape[1]),
          x_(rows_ * columns_),
          plain_(x_.size()),
          transposed_(x_.size()),
          inverse_(1),
          amax_(1) {
        draw.normal(x_, 1);
        x_[draw.below(x_.size())] = from_float<bf16>(draw.below(2) == 0 ? INFINITY : NAN);
        // Numbers beyond it are the largest number of the format.
        amax_[0] = 3;
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const Arguments a{plain_.data(),
                          transposed_.data(),
                          inverse_.data(),
                          x_.data(),
                          reinterpret_cast<const std::uint32_t*>(amax_.data()),
                          rows_,
                          columns_};
        switch (variant) {
            case 1:
                return launch(on, quantise_transpose_kernel1<Fp8::e4m3>,
                              static_cast<unsigned>(blocks_for<std::int64_t>(x_.size(), block_size)),
                              block_size, 0, a);
            case 2:
                return launch(on, quantise_transpose_kernel2<Fp8::e4m3>,
                              dim3(static_cast<unsigned>(blocks_for<std::int64_t>(columns_, tile_size)),
                                   static_cast<unsigned>(blocks_for<std::int64_t>(rows_, tile_size))),
                              block_size, 0, a);
            case 3:
                return llmc::cuda::quantise<Fp8::e4m3>(on, a.plain, a.transposed, a.inverse, a.x,
                                                       amax_.data(), rows_, columns_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        plain_.clear();
        transposed_.clear();
        inverse_.clear();
    }
    // Of the format's own definition, as the CPU rounds.
    void compare(Comparison& comparison) override {
        const float scale = llmc::fp8_scale(Fp8::e4m3, amax_[0]);
        comparison.see_equal("inverse", 0, inverse_[0], 1 / scale);
        for (std::int64_t i = 0; i < x_.size(); ++i) {
            const float x = to_float(x_[i]);
            const float expected = llmc::rounded_to_fp8<Fp8::e4m3>(x * scale);
            const std::uint8_t byte = plain_[i];
            comparison.see_equal("transposed", i, transposed_[i % columns_ * rows_ + i / columns_], byte);
            if (std::isfinite(x)) {
                const __half_raw number = __nv_cvt_fp8_to_halfraw(byte, __NV_E4M3);
                comparison.see_equal("plain", i, to_float(fp16(number)), expected);
            } else {
                comparison.see_equal("plain", i, byte & 0x7f, 0x7f);
            }
        }
    }
    double bytes() const override { return 4.0 * static_cast<double>(x_.size()); }

  private:
    std::int64_t rows_, columns_;
    Array<bf16> x_;
    Array<std::uint8_t> plain_, transposed_;
    Array<float> inverse_, amax_;
};

const Registration registration({
    .name = "quantise",
    .sizes = {"rows", "columns"},
    .variants = {{1, "one element a thread", {256}},
                 {2, "a tile in shared memory", {tile_size * tile_rows}},
                 {3, "4 x 4 elements a thread, transposed in registers", {fp8_tile_threads}}},
    .checked = {{16, 16}, {80, 144}, {144, 48}},
    .timed = {{8192, 4096}, {16384, 768}},
    .dtypes = {llmc::DType::bf16},
    .takes = {},
    .make = [](llmc::DType, const Shape& shape, Draw& draw) -> std::unique_ptr<Problem> {
        return std::make_unique<Quantise>(shape, draw);
    },
    .checked_for_races = {{80, 80}},
});

// For the report of kernels.
[[maybe_unused]] const auto kernels_of_the_program =
    std::tuple{&llmc::cuda::quantise<Fp8::e4m3>, &llmc::cuda::quantise<Fp8::e5m2>, &llmc::cuda::amax};

}  // namespace lab::quantise_variants
