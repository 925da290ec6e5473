// The sizes, the work and the workspace of the operations in ops_heads.h.
#include "llmc/device/ops_heads.h"

#include <algorithm>

#include "llmc/device/op_checks.h"

namespace llmc {

// ---- attention

namespace {

// The number of key heads, which divides that of the query heads.
std::int64_t key_heads_of(const Heads& k, std::int64_t heads) {
    check(k.count > 0 && heads % k.count == 0, "the number of key heads divides that of the query heads");
    return k.count;
}

// A window of 0, and one that is longer than the sequence, hide nothing.
std::int64_t keys_seen(std::int64_t window, std::int64_t sequence) {
    check(window >= 0, "a window is a number of keys, or 0 for all");
    return window == 0 ? sequence : std::min(window, sequence);
}

// q, k and v, or their gradients.
void check_query_key_value(const Heads& q, const Heads& k, const Heads& v, std::int64_t rows,
                           std::int64_t heads, std::int64_t key_heads, std::int64_t size) {
    check_heads(q, rows, heads, size, "q");
    check_heads(k, rows, key_heads, size, "k");
    check_heads(v, rows, key_heads, size, "v");
}

AttentionShape attention_sizes(const Tensor& out, const Tensor& lse, const Heads& q, const Heads& k,
                               const Heads& v, std::int64_t window) {
    check(out.shape.dimensions() == 4, "the output of attention is (B,T,H,D)");
    AttentionShape s{out.shape[0], out.shape[1], out.shape[2], out.shape[3]};
    check(s.sequence > 0, "attention is of one token or more");
    s.key_heads = key_heads_of(k, s.heads);
    s.window = keys_seen(window, s.sequence);
    check_shape(lse, {s.batch, s.heads, s.sequence}, "lse");
    check_query_key_value(q, k, v, s.batch * s.sequence, s.heads, s.key_heads, s.head_size);
    return s;
}

// Whether both are heads in the same rows, and some elements belong to both.
bool overlap(const Heads& a, const Heads& b) {
    return a.rows.data == b.rows.data && a.first < b.first + b.count * b.size &&
           b.first < a.first + a.count * a.size;
}

}  // namespace

AttentionShape AttentionForward::sizes() const {
    check_operands(*this);
    return attention_sizes(out, lse, q, k, v, window);
}
AttentionShape AttentionBackward::sizes() const {
    check_operands(*this);
    const AttentionShape s = attention_sizes(out, lse, q, k, v, window);
    check_shape(dout, out.shape, "dout");
    check_query_key_value(dq, dk, dv, s.batch * s.sequence, s.heads, s.key_heads, s.head_size);
    check(!overlap(dq, dk) && !overlap(dq, dv) && !overlap(dk, dv), "the gradients have places of their own");
    return s;
}
CachedAttentionShape AttentionCachedForward::sizes() const {
    check_operands(*this);
    check(out.shape.dimensions() == 3, "the output of attention is (n,H,D)");
    check(cache.shape.dimensions() == 4, "the cache is (T,2,K,D)");
    CachedAttentionShape s{out.shape[0], cache.shape[0], out.shape[1], out.shape[2]};
    check(s.rows > 0, "attention is of one token or more");
    s.key_heads = key_heads_of(k, s.heads);
    s.window = keys_seen(window, s.capacity);
    check_shape(cache, {s.capacity, 2, s.key_heads, s.head_size}, "cache");
    check_query_key_value(q, k, v, s.rows, s.heads, s.key_heads, s.head_size);
    check(position >= 0 && position <= s.capacity - s.rows, "the cache has room for the rows");
    return s;
}

OpCost AttentionForward::cost() const { return attention(*this, 2, sizes()); }
WorkspaceRequest AttentionForward::workspace() const { return request(out.dtype, sizes()); }
OpCost AttentionBackward::cost() const { return attention(*this, 5, sizes()); }
WorkspaceRequest AttentionBackward::workspace() const { return request(out.dtype, sizes()); }
OpCost AttentionCachedForward::cost() const {
    const CachedAttentionShape s = sizes();
    // The earlier rows of the cache that the first row sees are read, and the new ones written.
    const std::int64_t seen = std::min(position, s.window - 1);
    const double row = moved(cache) / static_cast<double>(s.capacity);
    return {.flops = 4.0 * elements_of(out) / static_cast<double>(s.rows) *
                     pairs(position, position + s.rows, s.window),
            .bytes = moved(out) + moved(q) + moved(k) + moved(v) + row * static_cast<double>(seen + s.rows),
            .arithmetic = Arithmetic::attention,
            .dtype = out.dtype};
}
WorkspaceRequest AttentionCachedForward::workspace() const {
    const CachedAttentionShape s = sizes();
    return request(out.dtype, AttentionShape{1, s.capacity, s.heads, s.head_size, s.key_heads, s.window});
}

// ---- heads

RopeSizes Rope::sizes() const {
    check_operands(*this);
    const Shape& shape = x.rows.shape;
    check(shape.dimensions() == 2 || shape.dimensions() == 3, "rope takes rows (B,T,R) or (n,R)");
    const RopeSizes s{number_of_rows(x), shape[shape.dimensions() - 2], x.count, x.size};
    check(s.head_size % 2 == 0, "rope takes heads of pairs");
    check(angles.shape.dimensions() == 3 && angles.shape[1] == s.head_size / 2 && angles.shape[2] == 2,
          "angles are (positions, D/2, 2)");
    check(position >= 0 && position <= angles.shape[0] - s.sequence, "there are angles for each position");
    return s;
}
namespace {

HeadNormSizes head_norm_sizes(const Heads& in, const Tensor& weight, const Tensor& rstd,
                              const SharedRows& shared = {}) {
    HeadNormSizes s{number_of_rows(in), in.count, in.size, in.size, 0};
    check_elements(weight, s.head_size, "weight");
    check_elements(rstd, s.rows * s.heads, "rstd");
    if (shared.sums) {
        check(s.heads == 1, "ranks share rows of one head");
        check(shared.size >= s.head_size, "a whole row is no smaller than a rank's part");
        const Shape& sums = shared.sums.shape;
        s.ranks = sums.dimensions() == 2 ? sums[0] : 0;
        check(s.ranks > 0, "the sums of rows that ranks share are (R,N)");
        check_shape(shared.sums, {s.ranks, s.rows}, "the sums of all ranks");
        s.whole = shared.size;
    }
    return s;
}

}  // namespace

HeadNormSizes HeadNormForward::sizes() const {
    check_operands(*this);
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd, shared);
    check_heads(out, s.rows, s.heads, s.head_size, "out");
    return s;
}
HeadNormSizes HeadNormSums::sizes() const {
    check_operands(*this);
    const HeadNormSizes s = head_norm_sizes(in, {}, {});
    check(s.heads == 1, "ranks share rows of one head");
    check_elements(sums, s.rows, "sums");
    return s;
}
HeadNormSizes HeadNormBackward::sizes() const {
    check_operands(*this);
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd, shared);
    check_heads(dout, s.rows, s.heads, s.head_size, "dout");
    check_heads(din, s.rows, s.heads, s.head_size, "din");
    check_elements(dweight, s.head_size, "dweight");
    return s;
}
HeadNormSizes HeadNormBackwardSums::sizes() const {
    check_operands(*this);
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd);
    check(s.heads == 1, "ranks share rows of one head");
    check_heads(dout, s.rows, s.heads, s.head_size, "dout");
    check_elements(sums, s.rows, "sums");
    return s;
}

OpCost Rope::cost() const { return {.flops = 3 * elements_of(x), .bytes = 2 * moved(x)}; }
OpCost HeadNormForward::cost() const { return elementwise(*this, 4 * elements_of(in)); }
OpCost HeadNormSums::cost() const { return elementwise(*this, 2 * elements_of(in)); }
OpCost HeadNormBackward::cost() const { return elementwise(*this, 12 * elements_of(in)); }
WorkspaceRequest HeadNormBackward::workspace() const {
    return request(in.rows.dtype, RowSizes{number_of_rows(in), in.size});
}
OpCost HeadNormBackwardSums::cost() const { return elementwise(*this, 4 * elements_of(in)); }

}  // namespace llmc
