// SPDX-License-Identifier: GPL-2.0
/*
 * Faults that the file system serves without entries in the process' page tables.
 *
 * No VMA of a heap is among those of the file. So the file system could not take back an entry that
 * it has put there, and whatever could pin the page by such an entry would keep it from knowing
 * who uses the page. So it gets a VMA in a scratch address space of one page, which no process
 * runs: it checks, allocates a block, takes its locks, and puts the entry there. From that entry
 * the caller makes a leaf like those of a file table.
 */

#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "core/compat.h"
#include "core/pt_slot.h"
#include "dax/heap.h"

/* An address space whose only page is at address 0. */
struct dax_scratch {
	struct mm_struct	mm;
	struct vm_area_struct	vma;
};

/* The top table is one of two pages: the kernel keeps a user's copy of it in the second one. */
#define DAX_SCRATCH_TOP_ORDER	1

static struct dax_scratch *dax_scratch_make(const struct dax_attachment *attachment, u64 page)
{
	const struct dax_heap *heap = attachment->heap;
	unsigned long flags = VM_SHARED | VM_MAYSHARE | VM_READ | VM_MAYREAD | VM_MIXEDMAP;
	struct dax_scratch *scratch = kzalloc(sizeof(*scratch), GFP_KERNEL);

	if (!scratch)
		return NULL;
	spin_lock_init(&scratch->mm.page_table_lock);
	scratch->vma.vm_mm = &scratch->mm;
	scratch->vma.vm_end = PAGE_SIZE;
	scratch->vma.vm_pgoff = page;
	scratch->vma.vm_file = attachment->file;
	if (heap->writes)
		flags |= VM_WRITE | VM_MAYWRITE;
	/* Where blocks are to be durable before they are shown, the file system sees to that. */
	if (attachment->is_durable)
		flags |= VM_SYNC;
	pt_vma_init_flags(&scratch->vma, flags);
	return scratch;
}

static void dax_scratch_free_tables(struct dax_scratch *scratch)
{
	struct mm_struct *mm = &scratch->mm;
	pteval_t entries[PT_MAX_ORDER + 1] = {};
	unsigned int level;

	if (!mm->pgd)
		return;
	for (level = PG_LEVEL_4K; level <= pt_slot_highest(); level++)
		entries[level] = pt_slot_get(mm, 0, level);
	for (level = PG_LEVEL_4K; level <= pt_slot_highest(); level++)
		if (entries[level])
			pt_table_free(pt_entry_table(entries[level]), level);
	free_pages((unsigned long)mm->pgd, DAX_SCRATCH_TOP_ORDER);
}

static void dax_scratch_free(struct dax_scratch *scratch)
{
	dax_scratch_free_tables(scratch);
	kfree(scratch);
}

/* Returns the table that the page's entry is in. */
static pteval_t *dax_scratch_make_tables(struct dax_scratch *scratch)
{
	unsigned long top = __get_free_pages(GFP_KERNEL | __GFP_ZERO, DAX_SCRATCH_TOP_ORDER);

	scratch->mm.pgd = (pgd_t *)top;
	return top ? pt_slot_own_table(&scratch->mm, 0) : NULL;
}

static vm_fault_t dax_scratch_serve(struct dax_scratch *scratch,
				    const struct vm_operations_struct *operations,
				    const struct vm_fault *vmf, bool is_mkwrite, pteval_t *leaf)
{
	pteval_t *table = dax_scratch_make_tables(scratch), entry;
	struct vm_fault own = {
		.vma = &scratch->vma,
		.gfp_mask = vmf->gfp_mask,
		.pgoff = scratch->vma.vm_pgoff,
		/* Of what the file system may do in a fault it must not release the mmap lock. */
		.flags = vmf->flags & (FAULT_FLAG_WRITE | FAULT_FLAG_MKWRITE | FAULT_FLAG_USER |
				       FAULT_FLAG_REMOTE | FAULT_FLAG_KILLABLE |
				       FAULT_FLAG_INTERRUPTIBLE),
	};
	vm_fault_t outcome;

	if (!table)
		return VM_FAULT_OOM;
	own.pud = pud_offset(p4d_offset(pgd_offset(&scratch->mm, 0), 0), 0);
	own.pmd = pmd_offset(own.pud, 0);
	scratch->vma.vm_page_prot = vmf->vma->vm_page_prot;
	scratch->vma.vm_ops = operations;
	outcome = is_mkwrite ? operations->pfn_mkwrite(&own) : operations->fault(&own);
	entry = READ_ONCE(*table);
	if (entry & _PAGE_PRESENT)
		*leaf = (entry & ~(pteval_t)_PAGE_DEVMAP) | _PAGE_SPECIAL;
	return outcome;
}

vm_fault_t dax_scratch_fault(const struct dax_attachment *attachment, const struct vm_fault *vmf,
			     u64 page, bool is_mkwrite, pteval_t *leaf)
{
	const struct vm_operations_struct *operations = attachment->operations;
	struct dax_scratch *scratch;
	vm_fault_t outcome;

	*leaf = 0;
	if (is_mkwrite && !operations->pfn_mkwrite)
		return VM_FAULT_SIGBUS;
	scratch = dax_scratch_make(attachment, page);
	if (!scratch)
		return VM_FAULT_OOM;
	outcome = dax_scratch_serve(scratch, operations, vmf, is_mkwrite, leaf);
	dax_scratch_free(scratch);
	return outcome;
}
