/* SPDX-License-Identifier: GPL-2.0 */
/* The pieces of a mount: the entries by which the tree goes into the process, and their places. */
#ifndef VELLUM_PT_PIECES_H
#define VELLUM_PT_PIECES_H

#include "core/pt_mount.h"

/* Finds the pieces, and the tail, of a mount that has its address. Returns 0, or -ENOMEM. */
int pt_pieces_find(struct pt_mount *mount);

/*
 * The alignment of a mapping of so many bytes: the size of the largest table that fits and has a
 * slot.
 */
unsigned long pt_pieces_alignment(unsigned long len);

/* Finds an address for a mapping, aligned so that few entries mount it. */
unsigned long pt_pieces_area(struct file *file, unsigned long addr, unsigned long len,
			     unsigned long pgoff, unsigned long flags);

#endif /* VELLUM_PT_PIECES_H */
