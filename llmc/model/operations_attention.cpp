// The row of attention in the table of operations, and how it is traced.
#include <fmt/format.h>

#include <utility>

#include "llmc/device/heads.h"
#include "llmc/model/operation_rows.h"
#include "llmc/model/operations.h"

namespace llmc {

namespace {

const Operation attention_row{
    .name = "attention",
    .forward =
        [](Calls& c) {
            c.call("attention_forward",
                   [](const Running& r, const Tensor* t) {
                       const auto [q, k, v] = packed_heads(t[2]);
                       r.ops.attention_forward(t[0], t[1], q, k, v);
                   },
                   {c.output(0), c.output(1), c.read(0)});
        },
    .backward =
        [](Calls& c) {
            c.call("attention_backward",
                   [](const Running& r, const Tensor* t) {
                       const auto [dq, dk, dv] = packed_heads(t[0]);
                       const auto [q, k, v] = packed_heads(t[2]);
                       r.ops.attention_backward(dq, dk, dv, t[1], q, k, v, t[3], t[4]);
                   },
                   {c.make_gradient(0), c.gradient(0).for_input(), c.read(0).for_input(),
                    c.output(0, Access::read).for_input(), c.output(1, Access::read).for_input()});
        },
    .rows =
        [](Calls& c) {
            const Shape qkv = c.read(0).shape;
            c.call("attention_cached_forward",
                   [](const Running& r, const Tensor* t) {
                       // The number of new rows, or of all rows.
                       const std::int64_t made = t[2].shape[1];
                       const Shape heads{t[1].shape[2], t[1].shape[3]};
                       const auto [q, k, v] = packed_heads(t[2]);
                       r.ops.attention_cached_forward(t[0].view(Shape{made} + heads), t[1], q, k, v,
                                                      r.rows.position + r.rows.count - made);
                   },
                   {c.output(0), c.cache({qkv[1], 2, qkv[3], qkv[4]}), c.read(0)});
        },
    .has_cache = true,
    .work =
        [](const Part& part, const Node& node) {
            return Work{.pairs = 4.0 * static_cast<double>(features_of(part, node.out[0]))};
        },
    .workspace =
        [](const Part& part, const Node& node, const PartSizes& sizes, WorkspaceRequest& request) {
            const Shape& heads = part.value(node.out[0]).shape;  // (T,NH,HS)
            at_least(request.heads, heads[1] / sizes.split.ranks);
            at_least(request.head_size, heads[2]);
        }};

}  // namespace

int attention(Trace& t, const std::string& name, int qkv) {
    const Shape& shape = t[qkv].shape;  // (T,3,NH,HS)
    if (shape.dimensions() != 4 || shape[1] != 3) {
        t.refuse(
            {.operation = &attention_row, .name = name},
            fmt::format("needs queries, keys and values of shape (T, 3, heads, head size), but {} has the "
                        "shape {}",
                        t[qkv].name, to_string(shape)));
    }
    Value out{.name = name, .label = name, .shape = {shape[0], shape[2], shape[3]}};
    Value lse{.name = name + ".lse",
              .shape = {shape[2], shape[0]},
              .placement = Placement::divided,
              .token_dim = 1,
              .divided_dim = 0,
              .is_fp32 = true};
    out.placement = Placement::divided;
    return t.add({.operation = &attention_row,
                  .name = name,
                  .in = {qkv},
                  .takes = Placement::divided,
                  .divided_dim = 2},
                 {std::move(out), std::move(lse)});
}

}  // namespace llmc
