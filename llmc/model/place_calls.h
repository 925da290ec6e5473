// Decides where the storages of a draft lie: in the space that is their home, or in scratch memory while they
// are in use.
#pragma once

#include <functional>
#include <map>

#include "llmc/model/draft.h"
#include "llmc/model/part_lists.h"

namespace llmc {

using ExtentOf = std::function<Extent(const DraftCall& call, const Operand& operand)>;

class Placing {
  public:
    // Adds the memory that it needs to `scratch`. All arguments must outlive it.
    Placing(const Part& part, const PartSizes& sizes, Scratch& scratch)
        : part_(part), sizes_(sizes), scratch_(scratch) {}

    List operator()(
        Drafting& draft, const Draft& calls,
        const ExtentOf& extent_of = [](const DraftCall&, const Operand&) { return Extent::batch; });

  private:
    ListOperand place(Drafting& draft, const Operand& operand, const DraftCall& call,
                      std::map<int, int>& placed, const ExtentOf& extent_of);
    int scratch_place(const Storage& storage, int id, std::map<int, int>& placed);

    const Part& part_;
    const PartSizes& sizes_;
    Scratch& scratch_;
};

}  // namespace llmc
