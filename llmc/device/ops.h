// The operations of a GPT, each defined once as mathematics. A call of an operation is a value: a struct with its
// operands and numbers (ops_norms.h, ops_products.h, ops_heads.h, ops_update.h). A device runs any of them (Ops::run),
// with a function for each struct.
//
// Letters: B batch, T sequence, C channels, NH heads, HS head size (C = NH*HS), V vocabulary, Vp the padded V
// that is stored, N = B*T rows. OC and IC are the output and input channels of a matrix product.
//
// Common to all operations:
// - `X` is the compute dtype (fp32, bf16 or fp16), the same for every X of a call. Arithmetic and sums are in fp32
//   whatever X is. A result is rounded to X once, when it is stored. (On GPUs, matmul_backward with pre_gelu
//   rounds din twice.)
// - "= " overwrites, "+= " accumulates. Gradients of parameters are always accumulated in fp32. If they are
//   kept in bf16, `accumulate` then adds them to the bf16 gradients.
// - An operand marked [optional] may be an empty Tensor.
// - Deterministic: the same call with the same shapes and threads gives the same bits.
// - A device may require 16-byte alignment: tensors of X begin at multiples of 16 bytes, and so do their rows
//   (C, OC, IC or Vp elements; for GELU all elements count as one row). Then the heads of attention begin at
//   such addresses, too. A device may also require that the head size is a multiple of 8 up to 128, and that
//   an update's segments consist of whole groups of 4 elements. `sum` and the elementwise operations take any
//   number of elements at any address, and products without bias and GELU rows of any size: adapters are narrow.
// - Shapes are checked; a wrong one is a ProgrammingError. So is a token or target that is not a row of its
//   table.
// - fields() calls `see` once with the operands and the numbers of a call, and returns what that returns. (A tuple of
//   them would cost every file that includes this one a third of a second to compile.) sizes() checks them, cost() is
//   the work of the call, and workspace() asks for the scratch memory of those that need some.
#pragma once

#include <string_view>
#include <variant>

#include "llmc/core/tensor.h"
#include "llmc/device/ops_heads.h"
#include "llmc/device/ops_norms.h"
#include "llmc/device/ops_products.h"
#include "llmc/device/ops_update.h"

namespace llmc {

// Every operation: the only list of them.
using Op =
    std::variant<EncoderForward, EncoderBackward, LayerNormForward, LayerNormBackward,
                 FusedResidualLayerNormForward, RmsNormForward, RmsNormBackward, FusedResidualRmsNormForward,
                 MatmulForward, MatmulBackward, MatmulAdd, GeluForward, GeluBackward, SwigluForward,
                 SwigluBackward, ReluSquaredForward, ReluSquaredBackward, AttentionForward, AttentionBackward,
                 AttentionCachedForward, Rope, HeadNormForward, HeadNormSums, HeadNormBackward,
                 HeadNormBackwardSums, FusedClassifier, ClassifierStatistics, ClassifierFromStatistics,
                 SoftCap, GlobalNormSquared, Sum, OptimizerUpdate, Momentum, CopyMatrix, Combine,
                 DequantiseNf4, Amax, Quantise, QuantiseToBytes, Fp8MatmulForward, Fp8MatmulBackward, Cast,
                 Copy, Fill, Add, Accumulate, AllFinite>;

std::string_view name_of(const Op& op);
OpCost cost_of(const Op& op);

class Ops {
  public:
    virtual ~Ops() = default;

    // Gives the operations their scratch memory (DeviceSizes::workspace_bytes); the caller keeps owning it.
    virtual void set_workspace(const Tensor& workspace) = 0;

    virtual void run(const Op& op) = 0;
};

}  // namespace llmc
