//! The kernel half of truepin.
#![no_std]
#![no_main]
