//! States the factors of the feed-forward layers of experts (`core/src/ops/experts.rs`).

use super::{Factor, Factors, Meeting, Piece, Signature};
use crate::mesh::Combine;
use crate::ops::experts::{EXPERT, GRADIENT, UP};
use smallvec::{SmallVec, smallvec};

/// x (N, C), expert (N, K), up (E, C, H), down (E, H, D), gate?: tokens divide, with all experts on every device or with blocks of
/// them; so does the hidden width.
pub fn expert_mlp(s: &Signature) -> Factors {
    factors(s, None)
}

/// As [`expert_mlp`], with the gradient before the gate. The results are the gradients of x and of the weights.
pub fn expert_mlp_backward(s: &Signature) -> Factors {
    factors(s, Some(GRADIENT))
}

fn factors(s: &Signature, gradient: Option<usize>) -> Factors {
    let (tokens, hidden) = (s.shape(EXPERT).dims()[0], s.shape(UP).dims()[2]);
    let (block, term) = (Piece::Block(0), Piece::Term(Combine::Sum));
    let operands = |of_tokens: Piece, of_weights: fn(usize) -> Piece| -> SmallVec<[Piece; 4]> {
        let weight = |k: usize| k >= UP && Some(k) != gradient;
        (0..s.operands.len()).map(|k| if weight(k) { of_weights(k - UP) } else { of_tokens }).collect()
    };
    // Result 0 is that of the tokens, or the gradient of x.
    let results = |of_tokens: Piece, of_weights: fn(usize) -> Piece| -> SmallVec<[Piece; 2]> {
        (0..s.results.len()).map(|k| if k == 0 { of_tokens } else { of_weights(k - 1) }).collect()
    };
    // Weights are up, down and gate; the hidden dim of down is its second.
    let of_hidden: fn(usize) -> Piece = |k| Piece::Block(if k == 1 { 1 } else { 2 });
    let whole: fn(usize) -> Piece = |_| Piece::Whole;
    let by_token = Factor::new(operands(block, whole), results(block, |_| Piece::Term(Combine::Sum)), tokens);
    let by_expert =
        Factor { meets: Some(Meeting::Experts), ..Factor::new(operands(block, whole), results(block, whole), tokens) };
    let by_hidden = Factor::new(operands(Piece::Whole, of_hidden), results(term, of_hidden), hidden);
    smallvec![by_token, by_expert, by_hidden]
}
