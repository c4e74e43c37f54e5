/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Leaves of 2 MiB: an entry of level 2 that maps 512 pages at once, in place of their table.
 *
 * The tree keeps the table elsewhere (a deposit). A thread that found the table before goes on
 * using it, and finds in it that it cannot. All changes go through the table:
 *
 *	put		all its entries are claimed, each from none; then the leaf takes its place
 *	take off	the table returns to its place, still claimed; TLBs are flushed; the
 *			entries become none
 *	split		the table returns to its place, its entries splitting; TLBs are flushed; the
 *			entries become leaves of 4 KiB
 *
 * Invariants:
 *
 * - A table has claimed entries while it is a deposit, and for a moment before and after. For the
 *   core and the CPU a claimed entry is none. Only the thread that has claimed an entry changes it.
 * - So each change has one winner. The thread that claims all entries puts a leaf. The thread that
 *   exchanges the leaf for the table takes it off or splits it.
 * - A CPU that still caches the table's place when a leaf has come finds entries that are none, and
 *   the fault makes it walk again. So nothing is flushed when a leaf comes.
 * - Between a leaf and the 512 leaves that it is split into there is a flush, and nothing is
 *   mapped: some CPUs do not tolerate translations of both sizes for one address. A thread that
 *   accesses a page meanwhile faults, and faults again until the leaves are there.
 * - A leaf is taken off under the lock of the table that holds it, as a leaf of 4 KiB is. The
 *   core's fault handler writes back under that lock what it has read before.
 *
 * Waiting: pt_huge_put() waits for nothing. A thread that takes a leaf off keeps the entries
 * claimed until it flushes, and it may take off more before that. So only a thread that brings
 * pages may wait for claimed entries. A split waits for nothing, and every thread may wait for it.
 */
#ifndef VELLUM_PT_HUGE_H
#define VELLUM_PT_HUGE_H

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_tree.h"

/* A state of an entry of level 1 that is not present. PT_CLAIMED is another. */
#define PT_SPLITTING	(_PAGE_ACCESSED | _PAGE_DIRTY)

/*
 * The flags of a 2 MiB leaf. Nothing pins it. It is accessed and dirty, as leaves of 4 KiB are, and
 * soft-dirty too, so the core has nothing to add.
 */
#define PT_HUGE_FLAGS	(PT_LEAF_FLAGS | _PAGE_PSE | _PAGE_SOFT_DIRTY | PT_HUGE_UNPINNABLE)

/* Whether the core handles leaves of 2 MiB that it meets. */
#define PT_HUGE_IS_POSSIBLE	IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE)

/*
 * Puts a leaf on the 512 pages from this one. It maps frames from this number on. Both numbers are
 * multiples of 512.
 *
 * Errors: EBUSY an entry is in use; EAGAIN another thread is putting such a leaf, or taking one
 * off, and may not have flushed; EEXIST there is such a leaf; EINVAL the tree does not have all of
 * these pages; ENOMEM.
 */
int pt_huge_put(struct pt_mount *mount, u64 page, u64 frame);

/*
 * Takes the leaf off, and returns its first frame; 0 if there is no leaf. The caller flushes, and
 * then opens the table's entries; then the frames are free.
 */
u64 pt_huge_take_off(struct pt_mount *mount, u64 page);
void pt_huge_open(struct pt_mount *mount, u64 page);

/*
 * Splits the leaf of the page into 512 leaves with these flags, and flushes. False: there is no
 * leaf, or another thread is splitting it.
 */
bool pt_huge_split(struct pt_mount *mount, u64 page, pteval_t flags);

/* For self-checks: counts leaves of 2 MiB whose table is in a wrong state. */
u64 pt_huge_wrong(struct pt_tree *tree);

#endif /* VELLUM_PT_HUGE_H */
