// The hybrid of latent and decompressed attention: the tilings of its two attention kernels together.
#pragma once

#include "mla_var6_plus_v4_decompressed.h"
#include "mla_var6_plus_v4_latent.h"

namespace hypermla {

struct MlaVar6PlusV4Tiling {
  MlaVar6PlusV4LatentTiling latent;
  MlaVar6PlusV4DecompressedTiling decompressed;
  bool partition = true;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("latent_Bm", self.latent.Bm, "rows per unit of latent work: queries of all heads");
    field("latent_Bn", self.latent.Bn, "latent tokens per step");
    field("latent_Bv", self.latent.Bv,
          "latent value columns per unit; the scores are made again for every k / Bv of them");
    field("latent_Bk", self.latent.Bk, "latent columns of one load for the scores");
    field("latent_parts", self.latent.parts, "cuts along the latent tokens of a request");
    field("latent_blocks", self.latent.blocks, "resident blocks of the latent kernel");
    field("latent_num_warps", self.latent.num_warps, "warps of a latent block that compute");
    field("latent_occupancy", self.latent.occupancy, "latent blocks on one multiprocessor");
    field("decompressed_Bb", self.decompressed.Bb, "requests per unit of decompressed work");
    field("decompressed_Bs", self.decompressed.Bs, "queries of a request per unit of decompressed work");
    field("decompressed_Bn", self.decompressed.Bn, "decompressed tokens per step");
    field("decompressed_parts", self.decompressed.parts, "cuts along the decompressed tokens of a request");
    field("decompressed_blocks", self.decompressed.blocks, "resident blocks of the decompressed kernel");
    field("decompressed_num_warps", self.decompressed.num_warps, "warps of a decompressed block that compute");
    field("decompressed_occupancy", self.decompressed.occupancy, "decompressed blocks on one multiprocessor");
    field("partition", self.partition, "each of the two kernels has multiprocessors of its own");
  }
};

}  // namespace hypermla
