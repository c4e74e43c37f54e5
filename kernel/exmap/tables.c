// SPDX-License-Identifier: GPL-2.0
/*
 * Shows the process the last level of the surface's page tables (refined exmap, section III-C): an
 * entry a page, from which the process reads whether the page is there.
 *
 * A privileged process sees the tables that the CPU walks. So nothing may ever write them: mprotect
 * cannot make the mapping writable, and writes for a debugger are refused as well.
 *
 * Other processes must not learn physical addresses, and nothing can hide these in a page that the
 * CPU walks. Such processes see separate pages with an entry for each leaf: 1 if there is a frame,
 * otherwise 0. While an exmap has such a mapping, a thread that changes a leaf changes its entry
 * after that. So the effect of ALLOC and FREE is visible when they return.
 */

#include <linux/capability.h>
#include <linux/mm.h>
#include <linux/xarray.h>

#include "core/compat.h"
#include "exmap/exmap.h"

/* The number of the table, from the offset, which parts of the mapping keep. */
static u64 exmap_table_number(const struct vm_fault *vmf)
{
	return vmf->pgoff - (VELLUM_EXMAP_OFFSET_TABLES >> PAGE_SHIFT);
}

static vm_fault_t exmap_tables_fault(struct vm_fault *vmf)
{
	struct exmap *exmap = vmf->vma->vm_private_data;
	pteval_t *table = pt_tree_make_leaf(&exmap->tree, exmap_table_number(vmf) * PT_ENTRIES);

	/* Memory may be missing for good, as the user has a limit: the CPU must not fault again. */
	if (!table)
		return VM_FAULT_SIGBUS;
	return vmf_insert_pfn(vmf->vma, vmf->address, page_to_pfn(virt_to_page(table)));
}

static bool exmap_is_there(struct exmap *exmap, u64 page)
{
	pteval_t *leaf = pt_tree_leaf(&exmap->tree, page);

	return leaf && exmap_has_frame(exmap, READ_ONCE(*leaf));
}

/*
 * Makes the page's entry agree with its leaf. Each thread that changes a leaf reads the leaf once
 * more after it wrote the entry, so the last write agrees with the leaf.
 */
static void exmap_show_page(struct exmap *exmap, u64 page)
{
	u64 *shown = xa_load(&exmap->shown, page / PT_ENTRIES);
	bool there;

	if (!shown)
		return;
	do {
		there = exmap_is_there(exmap, page);
		WRITE_ONCE(shown[page % PT_ENTRIES], there);
		smp_mb(); /* written before the leaf is read again */
	} while (exmap_is_there(exmap, page) != there);
}

void __exmap_leaf_changed(struct exmap *exmap, u64 page)
{
	pt_mount_leaf_changed(&exmap->mount, page);
	if (exmap->shows)
		exmap_show_page(exmap, page);
}

static u64 *exmap_make_shown(struct exmap *exmap, u64 number)
{
	u64 *shown = exmap_alloc_charged(exmap), *before;

	if (!shown)
		return NULL;
	before = xa_cmpxchg(&exmap->shown, number, NULL, shown, GFP_KERNEL_ACCOUNT);
	if (!before)
		return shown;
	exmap_free_charged(exmap, shown);
	return xa_is_err(before) ? NULL : before;
}

static vm_fault_t exmap_shown_fault(struct vm_fault *vmf)
{
	struct exmap *exmap = vmf->vma->vm_private_data;
	u64 number = exmap_table_number(vmf), page;
	u64 *shown = xa_load(&exmap->shown, number);

	if (!shown)
		shown = exmap_make_shown(exmap, number);
	if (!shown)
		return VM_FAULT_SIGBUS;
	/*
	 * A thread that changes a leaf from here on finds the page. Another thread may just be
	 * filling it.
	 */
	smp_mb();
	/* Another process may have the surface by now, and prune. RCU keeps its tables. */
	rcu_read_lock();
	for (page = number * PT_ENTRIES; page < (number + 1) * PT_ENTRIES; page++)
		exmap_show_page(exmap, page);
	rcu_read_unlock();
	return vmf_insert_pfn(vmf->vma, vmf->address, page_to_pfn(virt_to_page(shown)));
}

/* Nothing maps the pages any more. */
void exmap_tables_destroy(struct exmap *exmap)
{
	unsigned long number;
	void *shown;

	xa_for_each(&exmap->shown, number, shown)
		exmap_free_charged(exmap, shown);
	xa_destroy(&exmap->shown);
}

static const struct vm_operations_struct exmap_tables_vm_ops = {
	.fault = exmap_tables_fault,
};

static const struct vm_operations_struct exmap_shown_vm_ops = {
	.fault = exmap_shown_fault,
};

int exmap_map_tables(struct exmap *exmap, struct vm_area_struct *vma)
{
	if (!(vma->vm_flags & VM_SHARED) || vma->vm_flags & (VM_WRITE | VM_EXEC))
		return -EACCES;
	/* A leaf of 2 MiB has no table. */
	if (exmap->flags & VELLUM_EXMAP_HUGE)
		return -EOPNOTSUPP;
	/* While the surface is mapped it has all of its tables but those of the last level. */
	if (READ_ONCE(exmap->mount.mm) != vma->vm_mm)
		return -ENODEV;
	if (vma_pages(vma) > DIV_ROUND_UP(exmap->tree.pages, PT_ENTRIES))
		return -EINVAL;
	pt_vma_change_flags(vma, VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY,
			    VM_MAYWRITE | VM_MAYEXEC);
	if (capable(CAP_SYS_ADMIN)) {
		/* The process keeps what it sees, so no table is freed before the exmap ends. */
		exmap->shows_tables = true;
		vma->vm_ops = &exmap_tables_vm_ops;
	} else {
		vma->vm_ops = &exmap_shown_vm_ops;
		exmap->shows = true;
		exmap->watched = 0;
	}
	vma->vm_private_data = exmap;
	return 0;
}
