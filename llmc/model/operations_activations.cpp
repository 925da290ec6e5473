// The rows of activations of their own in the table of operations, and how they are traced. (GELU belongs to
// its product.)
#include <fmt/format.h>

#include <utility>

#include "llmc/model/operation_rows.h"
#include "llmc/model/operations.h"

namespace llmc {

namespace {

template <class Forward>
void call_forward(Calls& c) {
    c.call<Forward>({c.output(0).by_token(), c.read(0).by_token()});
}
template <class Backward>
void call_backward(Calls& c) {
    c.call<Backward>({c.make_gradient(0).by_token(), c.gradient(0).by_token(), c.read(0).by_token()});
}

const Operation swiglu_row{.name = "swiglu",
                           .forward = call_forward<SwigluForward>,
                           .backward = call_backward<SwigluBackward>,
                           .recompute = call_forward<SwigluForward>,
                           .recomputed = 0,
                           .work = elementwise<5, 11>};

const Operation relu_squared_row{.name = "relu_squared",
                                 .forward = call_forward<ReluSquaredForward>,
                                 .backward = call_backward<ReluSquaredBackward>,
                                 .recompute = call_forward<ReluSquaredForward>,
                                 .recomputed = 0,
                                 .work = elementwise<2, 3>};

int trace_activation(Trace& t, const Operation& row, const std::string& name, int x, Value out) {
    out.name = name + ".act";
    return t.add({.operation = &row,
                  .name = name,
                  .in = {x},
                  .takes = t[x].placement,
                  .divided_dim = t[x].divided_dim},
                 {std::move(out)});
}

}  // namespace

int swiglu(Trace& t, const std::string& name, int x) {
    Value out = t[x];
    const bool is_packed =
        out.shape.dimensions() == 2 && out.pieces.size() == 2 && out.pieces[0].count == out.pieces[1].count;
    if (!is_packed) {
        t.refuse({.operation = &swiglu_row, .name = name},
                 fmt::format("needs two packed values of one width, but {} has the shape {}", out.name,
                             to_string(out.shape)));
    }
    out.shape.resize(1, out.pieces[0].count);
    out.pieces.pop_back();
    return trace_activation(t, swiglu_row, name, x, std::move(out));
}

int relu_squared(Trace& t, const std::string& name, int x) {
    return trace_activation(t, relu_squared_row, name, x, t[x]);
}

}  // namespace llmc
