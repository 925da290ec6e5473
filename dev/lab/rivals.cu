// rivals.h: cuBLASLt, and what rivals_cudnn.cu has.
#include "dev/lab/rivals.h"

#include <cublasLt.h>

#include <memory>

#include "dev/lab/gpu.h"
#include "dev/lab/memory.h"
#include "dev/lab/rivals_cudnn.h"

namespace lab {
namespace {

void check_lt(cublasStatus_t status, const char* what) { llmc::check(status == CUBLAS_STATUS_SUCCESS, what); }

// out (N, OC) = in (N, IC) weight^T (OC, IC) + bias, bf16 with fp32 sums; the fastest of the heuristic's candidates.
class LtProduct {
  public:
    LtProduct(std::int64_t n, std::int64_t oc, std::int64_t ic)
        : out_(n * oc), in_(n * ic), weight_(oc * ic), bias_(oc), workspace_(32 << 20) {
        Draw draw(1);
        draw.normal(in_, 1);
        draw.normal(weight_, 1);
        draw.normal(bias_, 1);
        check_lt(cublasLtCreate(&handle_), "cublasLtCreate");
        // cuBLAS stores by columns: out^T = weight in^T.
        check_lt(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "cublasLtMatmulDescCreate");
        set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias_.data()));
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
        check_lt(cublasLtMatrixLayoutCreate(&a_, CUDA_R_16BF, ic, oc, ic), "layout");
        check_lt(cublasLtMatrixLayoutCreate(&b_, CUDA_R_16BF, ic, n, ic), "layout");
        check_lt(cublasLtMatrixLayoutCreate(&c_, CUDA_R_16BF, oc, n, oc), "layout");
        choose();
    }
    ~LtProduct() {
        cublasLtMatrixLayoutDestroy(a_);
        cublasLtMatrixLayoutDestroy(b_);
        cublasLtMatrixLayoutDestroy(c_);
        cublasLtMatmulDescDestroy(product_);
        cublasLtDestroy(handle_);
    }
    LtProduct(const LtProduct&) = delete;
    LtProduct& operator=(const LtProduct&) = delete;

    void run() { run(algorithm_); }

  private:
    template <class T>
    void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        check_lt(cublasLtMatmulDescSetAttribute(product_, attribute, &value, sizeof value), "attribute");
    }

    void run(const cublasLtMatmulAlgo_t& algorithm) {
        const float one = 1, zero = 0;
        check_lt(
            cublasLtMatmul(handle_, product_, &one, weight_.data(), a_, in_.data(), b_, &zero, out_.data(),
                           c_, out_.data(), c_, &algorithm, workspace_.data(), workspace_.bytes(), nullptr),
            "cublasLtMatmul");
    }

    void choose() {
        constexpr int most = 16;
        cublasLtMatmulPreference_t preference;
        check_lt(cublasLtMatmulPreferenceCreate(&preference), "preference");
        const std::size_t bytes = workspace_.bytes();
        check_lt(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &bytes, sizeof bytes),
                 "preference");
        cublasLtMatmulHeuristicResult_t candidates[most];
        int found = 0;
        check_lt(cublasLtMatmulAlgoGetHeuristic(handle_, product_, a_, b_, c_, c_, preference, most,
                                                candidates, &found),
                 "cublasLtMatmulAlgoGetHeuristic");
        cublasLtMatmulPreferenceDestroy(preference);
        llmc::check(found > 0, "cuBLASLt has no algorithm for this product");
        double best = 0;
        for (int i = 0; i < found; ++i) {
            const double ms = milliseconds([&] { run(candidates[i].algo); });
            if (i > 0 && ms >= best) continue;
            best = ms;
            algorithm_ = candidates[i].algo;
        }
    }

    Array<bf16> out_, in_, weight_, bias_;
    Array<char> workspace_;
    cublasLtHandle_t handle_ = nullptr;
    cublasLtMatmulDesc_t product_ = nullptr;
    cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
    cublasLtMatmulAlgo_t algorithm_{};
};

}  // namespace

std::vector<Rival> rivals_of(const std::string& operation, llmc::DType dtype,
                             const std::vector<std::int64_t>& shape) {
    if (dtype != llmc::DType::bf16) return {};
    if (operation == "matmul_forward") {
        const auto product = std::make_shared<LtProduct>(shape[0], shape[1], shape[2]);
        return {{"cuBLASLt", [product] { product->run(); }}};
    }
    return cudnn_rivals(operation, shape);
}

}  // namespace lab
