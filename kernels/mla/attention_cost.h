// Cost models of the attention kernels, without mask: every query sees every token. docs/predictions.md has tables.
//
// Multi-head Latent Attention: DeepSeek-V2, arXiv 2405.04434, section 2.1. Scores are Q K^T + QPE KPE^T. In the latent
// form K and V are never made: Q K^T = (Q Wk^T) Z^T with Qc = Q Wk^T, and softmax(A) V = (softmax(A) Z) Wv.
#pragma once

#include "hypermla/base/fields.h"
#include "hypermla/roofline/roofline.h"

namespace hypermla {

// Q [b,h,s,d], Qc [b,h,s,k], QPE [b,h,s,p], KPE [b,t,p], Z [b,t,k], K and V [b,t,h,d], O [b,h,s,d], O_latent [b,h,s,k].
struct AttentionShape {
  int b = 64;    // requests
  int s = 1;     // queries of one request
  int t = 4096;  // tokens of context
  int h = 128;   // heads
  int d = 128;   // head dimension without the rotary part
  int p = 64;    // rotary dimension
  int k = 512;   // latent dimension
  double bytes_per_element = 2;
};
// Of a problem struct that has all of these fields.
template <class Problem>
AttentionShape attention_shape(const Problem& at) {
  return {at.b, at.s, at.t, at.h, at.d, at.p, at.k, double(dtype_bytes(at.dtype))};
}

// All functions below throw Error for a shape with an extent below 1.

// Attention over decompressed K and V: 2d + p multiply-adds per (head, query, token).
//   flops 2bhst(2d+p)   bytes w bh(s+t)(2d+p)
// The bytes count KPE once per head, as a kernel with the rotary part stored in K reads it.
Cost flash_attention_cost(const AttentionShape& shape);

// Attention over the latent Z, which is both key and value: 2k + p multiply-adds per (head, query, token).
//   flops 2bhst(2k+p)   bytes w(bhs(2k+p) + bt(k+p))
// Qc comes in and O_latent goes out; absorbing Wk and applying Wv are not part of it.
Cost flash_mla_cost(const AttentionShape& shape);

// Both in one: `n` tokens decompressed, the other o = t-n latent. Z is read for the latent tokens, K and V for the
// others.
//   flops 2bhstp + 4bhsnd + 4bhsok
//   bytes w(bhsp + bhsd + bhsk + bok + btp + 2bhnd + bhsd + bhsk)
//            QPE    Q      Qc     Z     KPE   K, V   O_new  O_latent
// n = 0 is near flash_mla (it also counts Q and O_new), n = t near flash_attention with KPE shared by the heads.
// Throws Error unless 0 <= n <= t.
Cost mla_var6_plus_cost(const AttentionShape& shape, int n);

// O = O_latent Wv, per head a [bs,k] x [k,d] product: what flash_mla and the latent part of mla_var6_plus leave to do.
//   flops 2bhskd   bytes w(bhsk + hkd + bhsd)
//                          O_latent Wv  O
Cost output_decompression_cost(const AttentionShape& shape);

// The n, real and unclamped, at which mla_var6_plus takes equally long for arithmetic and traffic on a device with
// `ridge` FLOP per byte (R). Both are linear in n, so flops(n) = R bytes(n) has one solution:
//   n = [2hst(2k+p) - R w(hs(p+2d+2k) + t(k+p))] / [4hs(k-d) + R w(2hd-k)]
// b cancels. A token that moves from latent to decompressed saves 4bhs(k-d) FLOPs and costs w b(2hd-k) bytes: the two
// terms of the denominator. Not finite when they cancel.
double n_balance(const AttentionShape& shape, double ridge);

// The n in {0, tile, 2 tile, ..., t} for which mla_var6_plus is predicted fastest; the smallest when several are.
// The predicted time is the larger of two lines in n, so its minimum lies beside n_balance or at an end.
// Throws Error unless ridge > 0 and tile >= 1.
int n_star(const AttentionShape& shape, double ridge, int tile = 1);

}  // namespace hypermla
