// The matrix product out = in weight^T + bias: the best variants of dev/matmul_forward.cu, for fp32 and for bf16. The
// trainer's products are cuBLASLt's. These kernels are in the namespace of the trainer's kernels, and pass the same
// checks of spills and memory accesses.
//
// In both operands the input channels are contiguous, so both are read in rows. `in` has tiles of rows.
// `weight` has tiles of output channels, which are the columns of `out`.
#pragma once

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/ptx.cuh"

namespace llmc::cuda {

// in X (rows, in_channels), weight X (out_channels, in_channels), bias X (out_channels) or null,
// out X (rows, out_channels). The channels are multiples of 16 bytes.
template <class X>
struct MatmulForward {
    X* out;
    const X* in;
    const X* weight;
    const X* bias;
    std::int64_t rows;
    int out_channels, in_channels;
};

// A block computes a tile of 128 columns and, by default, as many rows.
inline constexpr int matmul_tile = 128;

struct MatmulTile {
    std::int64_t row;
    int column;
};

// Blocks with neighboring indices run together. They are taken in bands of 16 tiles of rows, so that they
// form about a square. They then share more of both operands in L2 than a row or a column of tiles would.
template <class X>
__device__ __forceinline__ MatmulTile matmul_tile_of_block(const MatmulForward<X>& product,
                                                           int tile_rows = matmul_tile) {
    constexpr int band = 16;
    const int rows = static_cast<int>(blocks_for<std::int64_t>(product.rows, tile_rows));
    const int columns = blocks_for(product.out_channels, matmul_tile);
    const int block = static_cast<int>(blockIdx.x);
    const int first_row = block / (band * columns) * band;
    const int height = rows - first_row < band ? rows - first_row : band;
    const int in_band = block % (band * columns);
    return {std::int64_t{first_row + in_band % height} * tile_rows, in_band / height * matmul_tile};
}

template <class X>
unsigned matmul_blocks(const MatmulForward<X>& product, int tile_rows = matmul_tile) {
    const std::int64_t blocks =
        blocks_for<std::int64_t>(product.rows, tile_rows) * blocks_for(product.out_channels, matmul_tile);
    check(blocks < (std::int64_t{1} << 31), "matmul: at most as many tiles as a grid has blocks");
    return static_cast<unsigned>(blocks);
}

// The part of an operand's tile that a thread fetches: 16 bytes of every n-th row, from its first row on.
template <class X>
struct RowsOfThread {
    const X* from;  // in the first row
    int left;       // rows of the tile from the first on; 0 or less: past the end

    __device__ __forceinline__ RowsOfThread(const X* matrix, std::int64_t first_row, std::int64_t rows,
                                            int channels, int row, int channel, int tile_rows = matmul_tile)
        : from(matrix + (first_row + row) * channels + channel),
          left(static_cast<int>(rows - first_row < tile_rows ? rows - first_row : tile_rows) - row) {}
};

// ---- fp32 ----

// A thread computes 8x8 sums, so that 16 numbers from shared memory serve 64 multiplications. Tiles of
// `depth` input channels are transposed in shared memory. There are two: one is used while the next is
// fetched, 16 bytes of each operand per thread.
template <class X>
__global__ void __launch_bounds__(256, 2) matmul_forward_kernel3(MatmulForward<X> product) {
    constexpr int pack = Packed<X>::size, depth = 2 * pack;
    constexpr int pitch = matmul_tile + 4;  // a multiple of 16 bytes, but not of the 128 bytes of all banks
    SHARED(float, a, [2][depth][pitch]);
    SHARED(float, b, [2][depth][pitch]);
    const int thread = static_cast<int>(threadIdx.x);
    const auto [first_row, first_column] = matmul_tile_of_block(product);

    // Beyond the last row, column or channel there are zeros.
    const int row_of_thread = thread / 2, channel = thread % 2 * pack;
    const RowsOfThread<X> of_a(product.in, first_row, product.rows, product.in_channels, row_of_thread,
                               channel);
    const RowsOfThread<X> of_b(product.weight, first_column, product.out_channels, product.in_channels,
                               row_of_thread, channel);
    const auto fetch = [&](const RowsOfThread<X>& of, int k) {
        const bool valid = of.left > 0 && k + channel < product.in_channels;
        return valid ? load(of.from + k) : from_bits<X>(uint4{});
    };
    const auto put = [&](float(&to)[depth][pitch], const Packed<X>& from) {
#pragma unroll
        for (int e = 0; e < pack; ++e) to[channel + e][row_of_thread] = to_float(from[e]);
    };
    // Rows 4y ... 4y+3 and those 64 further, and columns likewise. A warp then reads its operands without
    // bank conflicts.
    const int y = thread / 16 * 4, x = thread % 16 * 4;
    float sums[8][8] = {};
    const auto multiply = [&](const float(&rows)[depth][pitch], const float(&columns)[depth][pitch]) {
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            const Packed<float> r[2] = {load(&rows[k][y]), load(&rows[k][y + 64])};
            const Packed<float> c[2] = {load(&columns[k][x]), load(&columns[k][x + 64])};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][j] += r[i / 4][i % 4] * c[j / 4][j % 4];
            }
        }
    };

    Packed<X> next_a = fetch(of_a, 0), next_b = fetch(of_b, 0);
    for (int k = 0, buffer = 0; k < product.in_channels; k += depth, buffer ^= 1) {
        // No thread still reads this buffer. All have passed the last tile's barrier, so they have finished
        // with the tile before it.
        put(a[buffer], next_a);
        put(b[buffer], next_b);
        __syncthreads();
        next_a = fetch(of_a, k + depth);
        next_b = fetch(of_b, k + depth);
        multiply(a[buffer], b[buffer]);
    }

#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const std::int64_t row = first_row + y + i / 4 * 64 + i % 4;
        if (row >= product.rows) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = first_column + x + half * 64;
            if (column >= product.out_channels) continue;
            Quad<X> out;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float bias = product.bias ? to_float(product.bias[column + j]) : 0;
                out[j] = from_float<X>(sums[i][half * 4 + j] + bias);
            }
            store_quad(product.out + row * product.out_channels + column, out);
        }
    }
}

// ---- bf16, tensor cores ----

namespace detail {

// A tile of an operand in shared memory: rows of 32 channels, in chunks of 8 (16 bytes). Two rows have 128
// bytes, which all banks together deliver at once. The place of a chunk is XORed with the index of its pair
// of rows. ldmatrix reads the same chunk of 8 rows at a time; these are then in different banks. Rows that
// are a multiple of 8 apart have the same XOR: their places differ by whole rows. A thread thus computes one
// place for all its rows.
inline constexpr int tile_depth = 32;
// The elements of both operands' tiles. A block of 128 threads has 128 rows, one of 256 has 256 rows.
__host__ __device__ constexpr int tile_elements(int threads) { return (threads + matmul_tile) * tile_depth; }

struct Swizzled {
    __device__ __forceinline__ int operator()(int row, int chunk) const {
        return row * tile_depth + ((chunk ^ (row / 2 % 4)) * 8);
    }
};

// A warp's operands of 16 channels, in the registers that mma expects: 64 rows of `in` and 64 of `weight`.
struct Fragments {
    std::uint32_t a[4][4];  // 16 rows each
    std::uint32_t b[4][4];  // 16 columns each
};

// A warp of a block computes a 64x64 part of its tile; two neighboring warps do all 128 columns.
__device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) / 64 * 64; }
__device__ __forceinline__ int warp_column() { return static_cast<int>(threadIdx.x) / 32 % 2 * 64; }

// `step` counts groups of 16 channels.
template <class Place>
__device__ __forceinline__ void load_fragments(Fragments& f, const bf16* a, const bf16* b, int step,
                                               Place place LLMC_SITE) {
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const bf16* const of_a = a + place(warp_row() + lane % 16, step * 2 + lane / 16);
    const bf16* const of_b = b + place(warp_column() + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) ldmatrix_x4(f.a[i], of_a + i * 16 * tile_depth LLMC_PASS_SITE);
#pragma unroll
    for (int j = 0; j < 4; ++j) ldmatrix_x4(f.b[j], of_b + j * 16 * tile_depth LLMC_PASS_SITE);
}

using Sums = float[4][8][4];  // this thread's 4 elements of each tile of 16 rows and 8 columns

__device__ __forceinline__ void multiply(Sums& sums, const Fragments& f LLMC_SITE) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const std::uint32_t b[2] = {f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]};
            mma_m16n8k16<bf16>(sums[i][j], f.a[i], b LLMC_PASS_SITE);
        }
    }
}

// Four lanes fetch a row of a tile. A thread fetches every (threads / 4)-th row.
__device__ __forceinline__ int fetched_row() { return static_cast<int>(threadIdx.x) / 4; }
__device__ __forceinline__ int fetched_chunk() { return static_cast<int>(threadIdx.x) % 4; }

// Starts copying the tile that begins at channel k, with zeros beyond the last row or channel.
template <int rows, int threads>
__device__ __forceinline__ void copy_tile_async(bf16* tile, const RowsOfThread<bf16>& of, int k,
                                                int channels LLMC_SITE) {
    bf16* const to = tile + Swizzled{}(fetched_row(), fetched_chunk());
    const bool inside = k + fetched_chunk() * 8 < channels;
#pragma unroll
    for (int row = 0; row < rows; row += threads / 4) {
        copy_async_16(to + row * tile_depth, of.from + k + std::int64_t{row} * channels,
                      inside && row < of.left LLMC_PASS_SITE);
    }
}

// Stores a warp's sums, with bias and rounded, in `out` by way of shared memory (64x64 elements per warp).
// From its mma registers a lane would store scattered groups of 4 bytes. From shared memory it stores 16
// bytes, and eight lanes store a whole row of 128 bytes.
__device__ __forceinline__ void store_sums(const MatmulForward<bf16>& product, const MatmulTile& tile,
                                           const Sums& sums, bf16* staging LLMC_SITE) {
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const auto place = [](int row, int chunk) { return row * 64 + ((chunk ^ (row % 8)) * 8); };
    const int first_column = tile.column + warp_column();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int column = first_column + j * 8 + lane % 4 * 2;
        float bias[2] = {0, 0};
        if (product.bias && column < product.out_channels) {
            bias[0] = to_float(product.bias[column]);
            bias[1] = to_float(product.bias[column + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const std::uint32_t pair =
                    pack_pair<bf16>(sums[i][j][half * 2] + bias[0], sums[i][j][half * 2 + 1] + bias[1]);
                bf16* const to = staging + place(i * 16 + half * 8 + lane / 4, j) + lane % 4 * 2;
                *reinterpret_cast<std::uint32_t*>(to) = pair;
            }
        }
    }
    __syncwarp(~0u LLMC_PASS_SITE);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int row = i * 4 + lane / 8, chunk = lane % 8;
        const std::int64_t out_row = tile.row + warp_row() + row;
        const int column = first_column + chunk * 8;
        if (out_row < product.rows && column < product.out_channels) {
            store(product.out + out_row * product.out_channels + column, load(staging + place(row, chunk)));
        }
    }
}

}  // namespace detail

// The shared memory of matmul_forward_kernel6.
constexpr std::size_t matmul_pipeline_bytes(int stages, int threads) {
    return SharedAllocator::bytes<bf16>(static_cast<std::size_t>(stages * detail::tile_elements(threads)));
}

// Shared memory holds `stages` tiles of both operands: one is in use, the others are in flight. Within a
// tile, the fragments of the next 16 channels are loaded while the tensor cores use these.
template <int stages, int threads>
__global__ void __launch_bounds__(threads, 256 / threads)
    matmul_forward_kernel6(MatmulForward<bf16> product) {
    using namespace detail;
    SharedAllocator shared;
    constexpr int stage_elements = tile_elements(threads);
    static_assert(stages * stage_elements >= threads / warp_threads * 64 * 64,
                  "the output tile fits into the pipeline's memory");
    bf16* const pipeline = shared.take<bf16>(stages * stage_elements);
    const MatmulTile tile = matmul_tile_of_block(product, threads);
    const int tiles = blocks_for(product.in_channels, tile_depth);

    const RowsOfThread<bf16> of_a(product.in, tile.row, product.rows, product.in_channels, fetched_row(),
                                  fetched_chunk() * 8, threads);
    const RowsOfThread<bf16> of_b(product.weight, tile.column, product.out_channels, product.in_channels,
                                  fetched_row(), fetched_chunk() * 8);

    const auto fetch = [&](int t) {
        if (t < tiles) {
            bf16* const stage = pipeline + t % stages * stage_elements;
            copy_tile_async<threads, threads>(stage, of_a, t * tile_depth, product.in_channels);
            copy_tile_async<matmul_tile, threads>(stage + threads * tile_depth, of_b, t * tile_depth,
                                                  product.in_channels);
        }
        copy_async_commit();  // also an empty group, so that waits always count the same
    };
    const auto load_step = [&](Fragments& fragments, int t, int step LLMC_SITE) {
        const bf16* const stage = pipeline + t % stages * stage_elements;
        constexpr Swizzled place{};
        load_fragments(fragments, stage, stage + threads * tile_depth, step, place LLMC_PASS_SITE);
    };
    // Waits, in all threads, until all but the newest stages - 2 tiles have arrived.
    const auto wait = [](LLMC_ONLY_SITE) {
        copy_async_wait<stages - 2>();
        __syncthreads(LLMC_PASS_ONLY_SITE);
    };

    for (int t = 0; t < stages - 1; ++t) fetch(t);
    wait();
    Fragments fragments[2];
    load_step(fragments[0], 0, 0);
    Sums sums = {};
    for (int t = 0; t < tiles; ++t) {
        load_step(fragments[1], t, 1);
        // This overwrites the stage of tile t - 1. All threads finished reading that tile before the previous
        // wait().
        fetch(t + stages - 1);
        multiply(sums, fragments[0]);
        wait();
        load_step(fragments[0], t + 1, 0);  // after the last tile this reads old memory, which is not used
        multiply(sums, fragments[1]);
    }
    __syncthreads();  // the pipeline has been read: its memory is used for the output
    store_sums(product, tile, sums, pipeline + static_cast<int>(threadIdx.x) / warp_threads * 64 * 64);
}

// out X (rows, OC), in X (rows, IC), weight X (OC,IC), bias X (OC) or null. `block_threads`,
// 128 or 256, has an effect for bf16 only.
template <class X>
void matmul_forward(const LaunchContext& on, X* out, const X* in, const X* weight, const X* bias,
                    std::int64_t rows, int out_channels, int in_channels, int block_threads = 128) {
    check(in_channels % Packed<X>::size == 0 && out_channels % Packed<X>::size == 0,
          "matmul: channels are a multiple of 16 bytes");
    check(block_threads == 128 || block_threads == 256, "matmul: blocks have 128 or 256 threads");
    const MatmulForward<X> product{out, in, weight, bias, rows, out_channels, in_channels};
    if constexpr (std::is_same_v<X, float>) {
        launch(on, matmul_forward_kernel3<float>, matmul_blocks(product), 256, 0, product);
    } else if (block_threads == 256) {
        // One block fits a multiprocessor, limited by its registers. Four stages fit every chip.
        launch(on, matmul_forward_kernel6<4, 256>, matmul_blocks(product, 256), 256,
               matmul_pipeline_bytes(4, 256), product);
    } else {
        // Four stages if two blocks with four stages fit a multiprocessor, otherwise three.
        const bool four =
            2 * (matmul_pipeline_bytes(4, 128) + 1024) <= on.chip.shared_bytes_per_multiprocessor;
        launch(on, four ? matmul_forward_kernel6<4, 128> : matmul_forward_kernel6<3, 128>,
               matmul_blocks(product), 128, matmul_pipeline_bytes(four ? 4 : 3, 128), product);
    }
}

}  // namespace llmc::cuda
