// cuBLASLt on the CPU against a product in double precision, and its refusals.
#include <cublasLt.h>

#include <cstring>
#include <random>

#include "simt/runtime/device_memory.h"

namespace runtime_test {
namespace {

using llmc::cuda::bf16;

void must(cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    std::fprintf(stderr, "%s\n", cublasLtGetStatusString(status));
    std::exit(1);
}

template <class T>
constexpr cudaDataType_t type_of = std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;

double value(float x) { return x; }
double value(bf16 x) { return static_cast<double>(__bfloat162float(x)); }

// A description of one product, with the attributes that a test gives it.
class Product {
  public:
    Product(cudaDataType_t ab, cudaDataType_t cd, int m, int n, int k, bool transpose_a, bool transpose_b,
            int gap = 0, cublasComputeType_t compute = CUBLAS_COMPUTE_32F) {
        must(cublasLtCreate(&handle));
        must(cublasLtMatmulDescCreate(&description, compute, CUDA_R_32F));
        const std::int32_t transposes[] = {transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                                           transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N};
        set(CUBLASLT_MATMUL_DESC_TRANSA, transposes[0]);
        set(CUBLASLT_MATMUL_DESC_TRANSB, transposes[1]);
        const auto layout = [gap](cublasLtMatrixLayout_t* made, cudaDataType_t type, int rows, int columns) {
            must(cublasLtMatrixLayoutCreate(made, type, static_cast<std::uint64_t>(rows),
                                            static_cast<std::uint64_t>(columns), rows + gap));
        };
        layout(&a, ab, transpose_a ? k : m, transpose_a ? m : k);
        layout(&b, ab, transpose_b ? n : k, transpose_b ? k : n);
        layout(&c, cd, m, n);
    }
    ~Product() {
        for (auto* layout : {a, b, c}) must(cublasLtMatrixLayoutDestroy(layout));
        must(cublasLtMatmulDescDestroy(description));
        must(cublasLtDestroy(handle));
    }
    Product(const Product&) = delete;
    Product& operator=(const Product&) = delete;

    template <class T>
    void set(cublasLtMatmulDescAttributes_t attribute, T x) {
        must(cublasLtMatmulDescSetAttribute(description, attribute, &x, sizeof(x)));
    }

    std::vector<cublasLtMatmulHeuristicResult_t> offers(std::uint64_t workspace_bytes) {
        cublasLtMatmulPreference_t preference = nullptr;
        must(cublasLtMatmulPreferenceCreate(&preference));
        must(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                  &workspace_bytes, sizeof(workspace_bytes)));
        std::vector<cublasLtMatmulHeuristicResult_t> results(8);
        int found = 0;
        must(cublasLtMatmulAlgoGetHeuristic(handle, description, a, b, c, c, preference, 8, results.data(),
                                            &found));
        must(cublasLtMatmulPreferenceDestroy(preference));
        results.resize(static_cast<std::size_t>(found));
        return results;
    }
    // The first offer fails, and the last one varies.
    std::vector<cublasLtMatmulHeuristicResult_t> candidates(std::uint64_t workspace_bytes) {
        auto results = offers(workspace_bytes);
        results.erase(results.begin());
        results.pop_back();
        return results;
    }
    cublasStatus_t check(const cublasLtMatmulAlgo_t& algo) {
        cublasLtMatmulHeuristicResult_t result{};
        return cublasLtMatmulAlgoCheck(handle, description, a, b, c, c, &algo, &result);
    }

    cublasStatus_t run(float alpha, const void* a_data, const void* b_data, float beta, const void* c_data,
                       void* d_data, const cublasLtMatmulAlgo_t* algo = nullptr, void* workspace = nullptr,
                       std::size_t workspace_bytes = 0, cudaStream_t stream = nullptr) {
        return cublasLtMatmul(handle, description, &alpha, a_data, a, b_data, b, &beta, c_data, c, d_data, c,
                              algo, workspace, workspace_bytes, stream);
    }

    cublasLtHandle_t handle = nullptr;
    cublasLtMatmulDesc_t description = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
};

template <class T>
std::vector<T> draw(std::mt19937& random, int n) {
    std::vector<T> values;
    for (int i = 0; i < n; ++i) values.push_back(T(std::normal_distribution<float>()(random)));
    return values;
}

constexpr double unit_fp32 = 0x1p-24;
template <class T>
constexpr double unit = std::is_same_v<T, float> ? unit_fp32 : 0x1p-8;

double gelu(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double gelu_gradient(double x) { return (gelu(x + 1e-6) - gelu(x - 1e-6)) / 2e-6; }

struct Case {
    int m, n, k, gap;
    bool transpose_a, transpose_b;
    float alpha, beta;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
};

bool near(const char* what, const Case& x, int i, int j, double got, double expected, double bound) {
    if (std::abs(got - expected) <= bound) return true;
    std::fprintf(stderr, "%s (%d, %d) of (%d, %d, %d), epilogue %d: %g instead of %g, bound %g\n", what, i, j,
                 x.m, x.n, x.k, x.epilogue, got, expected, bound);
    return false;
}

// Tests every candidate that the library offers.
template <class AB, class CD>
bool is_product(const Case& x) {
    std::mt19937 random(1);
    const int a_leading = (x.transpose_a ? x.k : x.m) + x.gap, a_columns = x.transpose_a ? x.m : x.k;
    const int b_leading = (x.transpose_b ? x.n : x.k) + x.gap, b_columns = x.transpose_b ? x.k : x.n;
    const int c_leading = x.m + x.gap, aux_leading = (x.m + 7) / 8 * 8;
    const auto a = draw<AB>(random, a_leading * a_columns), b = draw<AB>(random, b_leading * b_columns);
    const auto c = draw<CD>(random, c_leading * x.n), aux = draw<CD>(random, aux_leading * x.n);
    const auto bias = draw<CD>(random, std::max(x.m, x.n));
    DeviceArray<AB> a_there(a.size()), b_there(b.size());
    DeviceArray<CD> c_there(c.size()), aux_there(aux.size()), bias_there(bias.size());
    a_there.upload(a);
    b_there.upload(b);
    const DeviceArray<char> workspace(1 << 16);
    const Stream stream;

    Product product(type_of<AB>, type_of<CD>, x.m, x.n, x.k, x.transpose_a, x.transpose_b, x.gap);
    product.set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(x.epilogue));
    product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias_there.data));
    product.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<const void*>(aux_there.data));
    product.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{aux_leading});

    for (const auto& candidate : product.candidates(workspace.bytes)) {
        c_there.upload(c);
        aux_there.upload(aux);
        bias_there.upload(bias);
        must(product.run(x.alpha, a_there.data, b_there.data, x.beta, c_there.data, c_there.data,
                         &candidate.algo, workspace.data, candidate.workspaceSize, stream));
        stream.synchronize();
        const auto d = c_there.download(), aux_after = aux_there.download(),
                   bias_after = bias_there.download();
        const auto at = [](int i) { return static_cast<std::size_t>(i); };
        const auto a_at = [&](int i, int l) {
            return value(a[at(x.transpose_a ? i * a_leading + l : l * a_leading + i)]);
        };
        const auto b_at = [&](int l, int j) {
            return value(b[at(x.transpose_b ? l * b_leading + j : j * b_leading + l)]);
        };
        const bool adds_bias = x.epilogue & CUBLASLT_EPILOGUE_BIAS;
        std::vector<double> row_sums(at(x.m)), row_bounds(at(x.m));
        for (int j = 0; j < x.n; ++j) {
            for (int i = 0; i < x.m; ++i) {
                double sum = 0, magnitude = 0;
                for (int l = 0; l < x.k; ++l) {
                    sum += a_at(i, l) * b_at(l, j);
                    magnitude += std::abs(a_at(i, l) * b_at(l, j));
                }
                const double added =
                    x.beta * value(c[at(j * c_leading + i)]) + (adds_bias ? value(bias[at(i)]) : 0);
                double expected = x.alpha * sum + added;
                // Every product and every sum rounds once, and the stored result rounds once more.
                double bound = (x.k + 4) * unit_fp32 * (std::abs(x.alpha) * magnitude + std::abs(added) + 1);
                if (x.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
                    if (!near("auxiliary", x, i, j, value(aux_after[at(j * aux_leading + i)]), expected,
                              bound + unit<CD> * std::abs(expected))) {
                        return false;
                    }
                    expected = gelu(expected);
                    bound *= 2;  // the slope is at most 1.13
                }
                if (x.epilogue == CUBLASLT_EPILOGUE_DGELU || x.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
                    expected *= gelu_gradient(value(aux[at(j * aux_leading + i)]));
                    bound = 2 * bound + 1e-6 * std::abs(expected) + 1e-6;  // error of the difference quotient
                }
                row_sums[at(i)] += expected;
                row_bounds[at(i)] += bound;
                if (!near("D", x, i, j, value(d[at(j * c_leading + i)]), expected,
                          bound + unit<CD> * std::abs(expected))) {
                    return false;
                }
            }
        }
        for (int i = 0; i < x.m; ++i) {
            double expected = row_sums[at(i)], bound = row_bounds[at(i)];
            if (x.epilogue == CUBLASLT_EPILOGUE_BGRADA) {
                expected = bound = 0;
                for (int l = 0; l < x.k; ++l)
                    expected += a_at(i, l), bound += x.k * unit_fp32 * std::abs(a_at(i, l));
            } else if (x.epilogue != CUBLASLT_EPILOGUE_DGELU_BGRAD) {
                break;
            }
            if (!near("bias", x, i, 0, value(bias_after[at(i)]), expected,
                      bound + (unit<CD> + x.n * unit_fp32) * (std::abs(expected) + 1))) {
                return false;
            }
        }
        for (int j = 0; j < x.n && x.epilogue == CUBLASLT_EPILOGUE_BGRADB; ++j) {
            double expected = 0, magnitude = 0;
            for (int l = 0; l < x.k; ++l) expected += b_at(l, j), magnitude += std::abs(b_at(l, j));
            if (!near("bias", x, 0, j, value(bias_after[at(j)]), expected,
                      x.k * unit_fp32 * magnitude + unit<CD> * std::abs(expected))) {
                return false;
            }
        }
    }
    return true;
}

bool is_product_of_any_type(const Case& x) {
    return is_product<float, float>(x) && is_product<bf16, bf16>(x) && is_product<bf16, float>(x);
}

TEST(CublasLt, products_of_any_shape_and_transposition) {
    for (const bool transpose_a : {false, true}) {
        for (const bool transpose_b : {false, true}) {
            EXPECT_TRUE(
                run_process({},
                            [=] {
                                return is_product_of_any_type({1, 1, 1, 0, transpose_a, transpose_b, 1, 0}) &&
                                       is_product_of_any_type({7, 5, 3, 2, transpose_a, transpose_b, 1, 1}) &&
                                       is_product_of_any_type(
                                           {33, 17, 65, 0, transpose_a, transpose_b, -0.5f, 2});
                            })
                    .good())
                << transpose_a << transpose_b;
        }
    }
}

TEST(CublasLt, epilogues) {
    for (const auto epilogue :
         {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
          CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA, CUBLASLT_EPILOGUE_BGRADB}) {
        const Outcome outcome = run_process({}, [=] {
            return is_product_of_any_type({13, 9, 21, 3, true, false, 1, 0, epilogue}) &&
                   is_product_of_any_type({8, 16, 5, 0, false, true, 2, 1, epilogue});
        });
        EXPECT_TRUE(outcome.good()) << outcome;
    }
}

// The number of different results of 10 products by the candidate with this reduction.
int different_results(std::uint32_t reduction) {
    std::mt19937 random(1);
    DeviceArray<float> a(1000), b(1000), d(1);
    a.upload(draw<float>(random, 1000));
    b.upload(draw<float>(random, 1000));
    const DeviceArray<char> workspace(1 << 16);
    Product product(CUDA_R_32F, CUDA_R_32F, 1, 1, 1000, false, false);
    std::map<float, int> results;
    for (const auto& candidate : product.candidates(workspace.bytes)) {
        std::uint32_t scheme = 0;
        must(cublasLtMatmulAlgoConfigGetAttribute(&candidate.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                  &scheme, sizeof(scheme), nullptr));
        for (int i = 0; i < 10 && scheme == reduction; ++i) {
            must(product.run(1, a.data, b.data, 0, d.data, d.data, &candidate.algo, workspace.data,
                             workspace.bytes));
            ++results[d.download()[0]];
        }
    }
    return static_cast<int>(results.size());
}

TEST(CublasLt, one_candidate_gives_other_bits_each_time) {
    EXPECT_TRUE(run_process({}, [] {
                    return different_results(CUBLASLT_REDUCTION_SCHEME_NONE) == 1 &&
                           different_results(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) == 1 &&
                           different_results(CUBLASLT_REDUCTION_SCHEME_INPLACE) > 1;
                }).good());
}

// A choice is saved as its configuration.
TEST(CublasLt, a_candidate_is_made_again_from_its_configuration) {
    EXPECT_TRUE(
        run_process({}, [] {
            Product product(CUDA_R_32F, CUDA_R_32F, 8, 8, 8, false, false);
            for (const auto& candidate : product.candidates(1 << 16)) {
                std::int32_t id = 0, splits = 0;
                std::uint32_t scheme = 0;
                std::size_t bytes = 0;
                const auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, auto& value) {
                    must(cublasLtMatmulAlgoConfigGetAttribute(&candidate.algo, attribute, &value,
                                                              sizeof(value), &bytes));
                    return bytes == sizeof(value);
                };
                if (!get(CUBLASLT_ALGO_CONFIG_ID, id) || !get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, splits) ||
                    !get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, scheme)) {
                    return false;
                }
                cublasLtMatmulAlgo_t made;
                cublasLtMatmulHeuristicResult_t result;
                const auto check = [&] {
                    return cublasLtMatmulAlgoCheck(product.handle, product.description, product.a, product.b,
                                                   product.c, product.c, &made, &result);
                };
                must(cublasLtMatmulAlgoInit(product.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_32F,
                                            CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, id, &made));
                if (splits > 1 && check() == CUBLAS_STATUS_SUCCESS) return false;  // not configured
                must(cublasLtMatmulAlgoConfigSetAttribute(&made, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                                          sizeof(splits)));
                must(cublasLtMatmulAlgoConfigSetAttribute(&made, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                          &scheme, sizeof(scheme)));
                must(check());
                if (result.workspaceSize != candidate.workspaceSize) return false;
                if (std::memcmp(&made, &candidate.algo, sizeof(made)) != 0) return false;
            }
            return true;
        }).good());
}

TEST(CublasLt, tf32_has_ten_bits_where_it_is_asked_for) {
    const auto product_of = [](cublasComputeType_t compute) {
        DeviceArray<float> x(1), y(1);
        x.upload({1 + 0x1p-12f});
        Product product(CUDA_R_32F, CUDA_R_32F, 1, 1, 1, false, false, 0, compute);
        must(product.run(1, x.data, x.data, 0, y.data, y.data));
        return y.download()[0];
    };
    EXPECT_TRUE(run_process({}, [&] {
                    return product_of(CUBLAS_COMPUTE_32F) > 1 &&
                           product_of(CUBLAS_COMPUTE_32F_FAST_TF32) == 1;
                }).good());
}

// As on a GPU, where cublasLtMatmulAlgoCheck "doesn't fully guarantee" that an algorithm runs.
TEST(CublasLt, the_first_offer_passes_its_check_and_fails) {
    EXPECT_TRUE(run_process({}, [] {
                    const DeviceArray<float> a(64), b(64), d(64);
                    const DeviceArray<char> workspace(1 << 16);
                    Product product(CUDA_R_32F, CUDA_R_32F, 8, 8, 8, false, false);
                    const auto first = product.offers(workspace.bytes).front();
                    const bool passes = product.check(first.algo) == CUBLAS_STATUS_SUCCESS;
                    const bool fails =
                        product.run(1, a.data, b.data, 0, d.data, d.data, &first.algo, workspace.data,
                                    workspace.bytes) == CUBLAS_STATUS_EXECUTION_FAILED;
                    return passes && fails && is_last_error(cudaErrorInvalidConfiguration);
                }).good());
}

TEST(CublasLt, the_last_offer_promises_the_same_bits_and_varies) {
    EXPECT_TRUE(run_process({}, [] {
                    DeviceArray<float> a(64), b(64), d(64);
                    for (DeviceArray<float>* x : {&a, &b}) x->upload(std::vector<float>(64, 1));
                    Product product(CUDA_R_32F, CUDA_R_32F, 8, 8, 8, false, false);
                    const auto last = product.offers(0).back();
                    std::uint32_t scheme = 1;
                    must(cublasLtMatmulAlgoConfigGetAttribute(
                        &last.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, nullptr));
                    const auto run = [&] {
                        must(product.run(1, a.data, b.data, 0, d.data, d.data, &last.algo));
                        return d.download();
                    };
                    return scheme == CUBLASLT_REDUCTION_SCHEME_NONE && run() != run();
                }).good());
}

// The library chooses by the bias's address too, and an algorithm for one of 256 bytes reads another one wrongly.
TEST(CublasLt, a_bias_that_is_null_at_the_heuristic_promises_256_bytes) {
    EXPECT_TRUE(run_process({}, [] {
                    DeviceArray<float> a(64), b(64), d(64), bias(64);
                    for (DeviceArray<float>* x : {&a, &b, &bias}) x->upload(std::vector<float>(64));
                    Product product(CUDA_R_32F, CUDA_R_32F, 8, 8, 8, false, false);
                    product.set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_BIAS});
                    const auto run_with = [&](const float* promised, const float* given) {
                        product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, promised);
                        const auto algorithm = product.candidates(0).front().algo;
                        product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, given);
                        return product.run(1, a.data, b.data, 0, d.data, d.data, &algorithm);
                    };
                    return run_with(nullptr, bias.data) == CUBLAS_STATUS_SUCCESS &&
                           run_with(nullptr, bias.data + 4) == CUBLAS_STATUS_INVALID_VALUE &&
                           run_with(bias.data + 4, bias.data + 4) == CUBLAS_STATUS_SUCCESS;
                }).good());
}

// The sum of 1 and of 2^-14, of which 14 bits keep 2^-13; but of 128 products each.
TEST(CublasLt, sums_in_8_bits_keep_14_bits_of_every_128_products) {
    EXPECT_TRUE(run_process({{"SIMT_CHIP", "90"}}, [] {
                    constexpr int k = 256;
                    DeviceArray<char> a(16 * k), b(16 * k);
                    DeviceArray<float> d(16 * 16);
                    std::vector<char> first(a.bytes), second(b.bytes);
                    first[0] = second[0] = 0x38;  // 1 * 1
                    first[1] = second[1] = 0x04;  // 2^-7 * 2^-7
                    first[129] = second[129] = 0x04;
                    a.upload(first);
                    b.upload(second);
                    Product product(CUDA_R_8F_E4M3, CUDA_R_32F, 16, 16, k, true, false);
                    must(product.run(1, a.data, b.data, 0, d.data, d.data));
                    return d.download()[0] == 1 + 0x1p-14f;
                }).good());
}

TEST(CublasLt, refuses_what_the_library_refuses) {
    EXPECT_TRUE(run_process({}, [] {
                    const DeviceArray<bf16> a(64), b(64), d(64);
                    const DeviceArray<char> workspace(1 << 16);
                    Product product(CUDA_R_16BF, CUDA_R_16BF, 8, 8, 8, false, false);
                    const auto candidates = product.candidates(workspace.bytes);
                    const auto& largest = candidates.back();
                    const auto run = [&](const void* to, const void* from, std::size_t bytes) {
                        return product.run(1, from, b.data, 0, d.data, const_cast<void*>(to), &largest.algo,
                                           workspace.data, bytes);
                    };
                    const bool good =
                        candidates.size() == 3 && product.candidates(0).size() == 1 &&
                        run(d.data, a.data, largest.workspaceSize) == CUBLAS_STATUS_SUCCESS &&
                        run(d.data, a.data, largest.workspaceSize - 1) == CUBLAS_STATUS_INVALID_VALUE &&
                        run(d.data, a.data + 1, 1 << 16) == CUBLAS_STATUS_INVALID_VALUE &&
                        run(nullptr, a.data, 1 << 16) == CUBLAS_STATUS_INVALID_VALUE;
                    product.set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_BIAS});
                    const bool no_bias = run(d.data, a.data, 1 << 16) == CUBLAS_STATUS_INVALID_VALUE;
                    const std::int64_t leading = 7;
                    must(cublasLtMatrixLayoutSetAttribute(product.a, CUBLASLT_MATRIX_LAYOUT_LD, &leading, 8));
                    const bool too_small = run(d.data, a.data, 1 << 16) == CUBLAS_STATUS_INVALID_VALUE;
                    return good && no_bias && too_small &&
                           cublasLtMatrixLayoutSetAttribute(product.a, CUBLASLT_MATRIX_LAYOUT_LD, &leading,
                                                            4) == CUBLAS_STATUS_INVALID_VALUE;
                }).good());
}

// Bytes are e4m3 or e5m2, times a scale in the device's memory. 0x38 and 0x3c are their ones, 0x40 their twos.
TEST(CublasLt, factors_in_8_bits) {
    const auto status_of = [](const char* chip, cudaDataType_t of_a, cudaDataType_t of_b, bool transpose_a,
                              int k, float expected) {
        return run_process({{"SIMT_CHIP", chip}},
                           [=] {
                               DeviceArray<char> a(64 * 64), b(64 * 64);
                               a.upload(std::vector<char>(a.bytes, of_a == CUDA_R_8F_E4M3 ? 0x38 : 0x3c));
                               b.upload(std::vector<char>(b.bytes, 0x40));
                               const DeviceArray<float> d(64 * 64);
                               DeviceArray<float> scale(1);
                               scale.upload({0.25F});
                               Product product(of_a, CUDA_R_32F, 16, 32, k, transpose_a, false);
                               const auto type_of_b = static_cast<std::uint32_t>(of_b);
                               must(cublasLtMatrixLayoutSetAttribute(product.b, CUBLASLT_MATRIX_LAYOUT_TYPE,
                                                                     &type_of_b, 4));
                               product.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                                           static_cast<const void*>(scale.data));
                               if (product.run(1, a.data, b.data, 0, d.data, d.data) != CUBLAS_STATUS_SUCCESS)
                                   return false;
                               runtime_test::must(cudaDeviceSynchronize());
                               return d.download()[16 * 32 - 1] == expected;
                           })
            .status;
    };
    constexpr auto e4m3 = CUDA_R_8F_E4M3, e5m2 = CUDA_R_8F_E5M2;
    EXPECT_EQ(status_of("90", e4m3, e4m3, true, 48, 0.25F * 2 * 48), 0);
    EXPECT_EQ(status_of("90", e5m2, e4m3, true, 48, 0.25F * 2 * 48), 0);
    EXPECT_EQ(status_of("90", e4m3, e5m2, true, 48, 0.25F * 2 * 48), 0);
    EXPECT_EQ(status_of("90", e5m2, e5m2, true, 48, 0), wrong);
    EXPECT_EQ(status_of("86", e4m3, e4m3, true, 48, 0), wrong);
    EXPECT_EQ(status_of("90", e4m3, e4m3, false, 48, 0), wrong);
    EXPECT_EQ(status_of("90", e4m3, e4m3, true, 40, 0), wrong);
}

TEST(CublasLt, reports_what_a_gpu_would_not) {
    const auto run = [](auto body) {
        return run_process({},
                           [=] {
                               const DeviceArray<float> a(64), b(64), d(64);
                               Product product(CUDA_R_32F, CUDA_R_32F, 8, 8, 8, false, false);
                               body(product, a.data, b.data, d.data);
                               return true;
                           })
            .errors;
    };
    EXPECT_NE(run([](Product& p, float* a, float* b, float* d) {
                  p.run(1, a + 4, b, 0, d, d);
              }).find("simt: cublasLtMatmul: A is not, or not wholly, in allocated memory"),
              std::string::npos);
    EXPECT_NE(run([](Product& p, float* a, float* b, float*) {
                  p.run(1, a, b, 0, a, a);
              }).find("simt: cublasLtMatmul: D lies over A"),
              std::string::npos);
    EXPECT_NE(run([](Product& p, float* a, float* b, float* d) {
                  const Stream one, other;
                  must(p.run(1, a, b, 0, d, d, nullptr, nullptr, 0, one));
                  must(p.run(1, d, b, 0, a, a, nullptr, nullptr, 0, other));
              }).find("simt: cublasLtMatmul in stream 2 reads memory that cublasLtMatmul in stream 1 writes"),
              std::string::npos);
    EXPECT_EQ(run([](Product& p, float* a, float* b, float* d) {
                  const Stream one, other;
                  must(p.run(1, a, b, 0, d, d, nullptr, nullptr, 0, one));
                  one.synchronize();
                  must(p.run(1, d, b, 0, a, a, nullptr, nullptr, 0, other));
                  other.synchronize();
              }),
              "");
}

}  // namespace
}  // namespace runtime_test
