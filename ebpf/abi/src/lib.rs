//! Layouts shared by the kernel half and user space.
#![no_std]
