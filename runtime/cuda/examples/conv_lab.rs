//! Times every plan that cuDNN offers for the convolutions of ResNet-50, on a GPU.
//!
//!     cargo run --release -p perilune-cuda --example conv_lab [images] [plans]

use perilune_cuda::conv::Kind;
use perilune_cuda::lab;

/// Input channels, rows, output channels, kernel size, stride.
const SHAPES: &[[i64; 5]] = &[
    [3, 224, 64, 7, 2],
    [4, 224, 64, 7, 2],
    [8, 224, 64, 7, 2],
    [64, 56, 64, 1, 1],
    [64, 56, 64, 3, 1],
    [64, 56, 256, 1, 1],
    [256, 56, 64, 1, 1],
    [256, 56, 128, 1, 1],
    [128, 56, 128, 3, 2],
    [128, 28, 128, 3, 1],
    [128, 28, 512, 1, 1],
    [256, 56, 512, 1, 2],
    [512, 28, 128, 1, 1],
    [512, 28, 256, 1, 1],
    [256, 28, 256, 3, 2],
    [256, 14, 256, 3, 1],
    [256, 14, 1024, 1, 1],
    [512, 28, 1024, 1, 2],
    [1024, 14, 256, 1, 1],
    [1024, 14, 512, 1, 1],
    [512, 14, 512, 3, 2],
    [512, 7, 512, 3, 1],
    [512, 7, 2048, 1, 1],
    [1024, 14, 2048, 1, 2],
    [2048, 7, 512, 1, 1],
];

fn main() {
    let mut args = std::env::args().skip(1).filter_map(|a| a.parse::<i64>().ok());
    let (n, most) = (args.next().unwrap_or(256), args.next().unwrap_or(8));
    for kind in [Kind::Forward, Kind::Input, Kind::Weight] {
        let problems: Vec<_> = SHAPES.iter().map(|s| lab::square(kind, n, *s)).collect();
        match lab::convolutions(&problems, most as usize) {
            Ok(text) => print!("{text}"),
            Err(e) => println!("{e}"),
        }
    }
}
