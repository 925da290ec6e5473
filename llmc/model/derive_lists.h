// Two steps of the derivation of a part's lists (part_lists.h): where the storages of a draft lie
// (placing.cpp), and the lists for generation (derive_rows.cpp).
#pragma once

#include <functional>
#include <map>

#include "llmc/model/draft.h"
#include "llmc/model/part_lists.h"

namespace llmc {

using ExtentOf = std::function<Extent(const DraftCall& call, const Operand& operand)>;

// Decides where the storages of a draft lie: in the space that is their home, or in scratch memory while they
// are in use.
class Placing {
  public:
    // Adds the memory that it needs to `scratch`. All arguments must outlive it.
    Placing(const Part& part, const PartSizes& sizes, Scratch& scratch)
        : part_(part), sizes_(sizes), scratch_(scratch) {}

    List operator()(
        Calls& draft, const Draft& calls,
        const ExtentOf& extent_of = [](const DraftCall&, const Operand&) { return Extent::batch; });

  private:
    ListOperand place(Calls& draft, const Operand& operand, const DraftCall& call, std::map<int, int>& placed,
                      const ExtentOf& extent_of);
    int scratch_place(const Storage& storage, int id, std::map<int, int>& placed);

    const Part& part_;
    const PartSizes& sizes_;
    Scratch& scratch_;
};

// Makes a part's lists for generation: the forward pass of a few new tokens (rows) of one sequence, after the
// tokens whose keys and values are in a cache. They need no memory of their own: the cache lies where a
// training step keeps the keys and values. Each tensor-parallel rank computes all new rows, even if the ranks
// divide the tokens in a training step.
//
// Needs a part whose forward pass has been drafted, and whose kept values have been placed.
void derive_rows(PartLists& lists, Calls& draft, Placing& placing);

}  // namespace llmc
